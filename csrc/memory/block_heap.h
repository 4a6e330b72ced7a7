// Cuts regions into blocks and keeps count of them. A pool adds the lock, the source of regions and
// the GPU.
#ifndef CXL_OFFLOAD_MEMORY_BLOCK_HEAP_H_
#define CXL_OFFLOAD_MEMORY_BLOCK_HEAP_H_

#include <cstddef>
#include <list>
#include <memory>
#include <vector>

#include "memory/extent_map.h"
#include "memory/region.h"
#include "memory/statistics.h"

namespace cxl_offload::memory {

// Chunks grow with the pool, because every region is a mapping, and a process may have 65,530 of
// them.
inline constexpr size_t kChunkFraction = 256;
// How much may be cached beyond the peak of live blocks, and how much of a pinned block may be
// unused at its end.
inline constexpr size_t kSlackFraction = 256;

// Memory that is being returned: a whole region, or a part of a region that stays.
struct Reclaimed {
  std::unique_ptr<Region> region;
  Extent* part = nullptr;
  size_t bytes = 0;
  bool reusable = false;  // whether the part may serve again if it cannot be returned

  explicit operator bool() const { return region != nullptr || part != nullptr; }
};

// Not thread-safe. It calls only const functions of a region. It hands memory that must be returned
// to the caller as Reclaimed, so that the caller can return it without holding a lock.
class BlockHeap {
 public:
  explicit BlockHeap(size_t page_bytes);

  // How many bytes a block for `bytes` occupies.
  size_t capacity_for(size_t bytes) const;

  // The largest pinned block that may serve a request of `capacity` bytes.
  static size_t largest_fit(size_t capacity);

  // Returns a block of free memory, or null.
  Extent* reuse(size_t bytes);
  // How large a region to map for `bytes` when no free block fits: the size with room for more
  // small blocks, and the least size that is enough.
  size_t growth_for(size_t bytes) const;
  size_t least_growth_for(size_t bytes) const;
  // How far a growth would go beyond what the peak of live blocks needs, and how much of that could
  // be saved by returning free memory. Other threads are mapping `growing` bytes.
  size_t excess(size_t growth, size_t growing) const;
  size_t returnable_bytes() const;
  // Adds a region and takes a block from it. `region` is empty afterwards, or as before if this
  // throws. `rest` is what must be returned at once.
  Extent* adopt(std::unique_ptr<Region>& region, size_t bytes, Reclaimed& rest);

  // A block was dropped. It then waits for the GPU, or is free again.
  void wait(Extent* block, size_t bytes) noexcept;
  Reclaimed free_held(Extent* block, size_t bytes, bool displaced) noexcept;
  Reclaimed free_waiting(Extent* block, bool displaced) noexcept;

  // Takes free memory out, at least `bytes` if there is so much, beginning with the regions that
  // were unused for longest. Parts smaller than `least_part` stay, because each hole may cost a
  // mapping.
  std::vector<Reclaimed> collect(size_t bytes, size_t least_part);
  // A part was returned (`left`), or could not be returned. If the region was kept only because of
  // that part, this returns the rest of the region.
  Reclaimed finish(Reclaimed& reclaimed, bool left) noexcept;

  Statistics& statistics() { return statistics_; }
  const Statistics& statistics() const { return statistics_; }
  static Region* region_of(const Extent* block, size_t page_bytes);
  // Throws std::logic_error naming the first thing that does not add up.
  void check_invariants() const;

 private:
  struct RegionArena : Arena {
    std::unique_ptr<Region> region;
    size_t mapped_bytes = 0;  // without the parts that left
    size_t lost = 0;          // how many of its extents are lost
    bool reusable = true;     // whether its blocks may serve again at all
    bool striped = false;     // whether a block's place in it matters
    bool single = false;      // one block at a time
    bool idle = false;        // in idle_, not in busy_
    std::list<RegionArena>::iterator self;
  };
  struct SlabArena : Arena {
    Extent* pages = nullptr;
    std::list<SlabArena>::iterator self;
  };
  struct Sums;

  static RegionArena* owner(const Extent* pages) { return static_cast<RegionArena*>(pages->arena); }
  ExtentMap& map_of(const RegionArena& arena) { return arena.single ? singles_ : pages_; }

  Extent* take_pages(size_t capacity);
  Extent* take_single(size_t capacity);
  Extent* take_cut(size_t capacity, size_t extent_bytes);
  Extent* take_small(size_t capacity);
  Extent* cut_slab(std::list<SlabArena>& slab, Extent* pages, size_t capacity);
  Reclaimed free_block(Extent* block, bool displaced) noexcept;
  Reclaimed free_pages(Extent* pages, bool displaced) noexcept;
  Reclaimed settle(RegionArena& arena) noexcept;
  Reclaimed detach(RegionArena& arena) noexcept;
  Reclaimed start_leaving(Extent* part, bool reusable) noexcept;
  Extent* count_held(Extent* block, size_t bytes) noexcept;
  void count_cached() noexcept;
  void make_busy(RegionArena& arena) noexcept;
  void check_extents(const Arena& arena, Sums& sums, bool small) const;

  const size_t page_bytes_;
  const size_t slab_bytes_;
  // The properties of the last region. All regions of a source are alike, except those that
  // spilled.
  size_t cut_bytes_ = 0;
  bool pinned_ = false;
  // False until a region has shown that any part of it keeps the rule; parts of a stripe do not.
  bool shares_regions_ = false;

  std::list<RegionArena> busy_;
  std::list<RegionArena> idle_;  // nothing of them is in use; the longest unused is first
  size_t idle_bytes_ = 0;
  std::list<SlabArena> slabs_;
  ExtentMap pages_;    // extents of regions that are cut
  ExtentMap singles_;  // extents of pinned regions that were made for one block
  ExtentMap small_;    // extents of slabs
  Statistics statistics_;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_BLOCK_HEAP_H_
