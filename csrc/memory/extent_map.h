// Extents of arenas. They are cut, merged with free neighbours, and found by best fit in O(log n).
#ifndef CXL_OFFLOAD_MEMORY_EXTENT_MAP_H_
#define CXL_OFFLOAD_MEMORY_EXTENT_MAP_H_

#include <cstddef>
#include <deque>
#include <map>
#include <span>
#include <utility>

namespace cxl_offload::memory {

struct Extent;

// A range that extents are cut from. Extents of two arenas never merge, even side by side.
struct Arena {
  std::byte* begin = nullptr;
  size_t bytes = 0;
  Extent* first = nullptr;  // the extent with the lowest address
  size_t taken = 0;         // how many of its extents are taken
};

enum class ExtentState {
  kFree,     // in the index
  kHeld,     // a live block
  kWaiting,  // a dropped block that a GPU may still use
  kLeaving,  // being returned to where it came from
  kLost,     // must not be used again, and goes with its arena
};

// Consecutive bytes of one arena.
struct Extent {
  std::byte* begin = nullptr;
  size_t bytes = 0;
  Arena* arena = nullptr;
  Extent* previous = nullptr;  // in the arena; not always adjacent, for extents can be removed
  Extent* next = nullptr;
  ExtentState state = ExtentState::kFree;

  std::byte* end() const { return begin + bytes; }
};

// Freeing needs no memory and cannot fail: every extent keeps its place in the index while it is
// taken. Not thread-safe.
class ExtentMap {
 public:
  // The free extents, smallest first, lower addresses first among equals.
  using Index = std::map<std::pair<size_t, std::byte*>, Extent*>;

  ExtentMap() = default;
  ExtentMap(const ExtentMap&) = delete;
  ExtentMap& operator=(const ExtentMap&) = delete;

  // Afterwards add, split and take can make that many extents without allocating. One take makes up
  // to two.
  void reserve(size_t extents);
  // Makes the arena's range one taken extent (kHeld).
  Extent* add(Arena* arena);
  // Forgets all extents of the arena.
  void remove(Arena* arena) noexcept;

  // The smallest free extents of at least `bytes` start here.
  Index::const_iterator best_fit(size_t bytes) const {
    return index_.lower_bound({bytes, nullptr});
  }
  Index::const_iterator end() const { return index_.end(); }
  // Null if there is none.
  Extent* largest() const { return index_.empty() ? nullptr : index_.rbegin()->second; }
  size_t free_bytes() const { return free_bytes_; }
  size_t free_count() const { return index_.size(); }

  // Takes (kHeld) the part [offset, offset + bytes) of a free extent; what is left on either side
  // stays free. If this throws nothing has changed.
  Extent* take(Extent* extent, size_t offset, size_t bytes);
  // Cuts the end off a taken extent, as a taken extent of its own. If this throws nothing has
  // changed.
  Extent* split(Extent* extent, size_t bytes);
  // Frees a taken extent, merges it with its free neighbours and returns the result.
  Extent* give_back(Extent* extent) noexcept;
  // Forgets a taken extent: its bytes are no longer part of the arena.
  void remove(Extent* extent) noexcept;

 private:
  struct Slot : Extent {
    Index::node_type entry;  // while the extent is taken
  };

  Slot* fresh() noexcept;
  void link_after(Extent* extent, Extent* left) noexcept;
  void unlink(Extent* extent) noexcept;
  void enter(Extent* extent) noexcept;
  void leave(Extent* extent) noexcept;
  void retire(Extent* extent) noexcept;

  Index index_;
  size_t free_bytes_ = 0;
  std::deque<Slot> slots_;   // all there ever were
  Extent* spare_ = nullptr;  // those not in use, linked by `next`
  size_t spares_ = 0;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_EXTENT_MAP_H_
