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

// Chunks grow with the pool: every region is a mapping, of which a process has 65,530.
inline constexpr size_t kChunkFraction = 256;
// How much may be cached beyond the peak of live blocks, and how much of a pinned block may be
// unused at its end.
inline constexpr size_t kSlackFraction = 256;

// Memory on its way back: a whole region, or a part of one that stays.
struct Reclaimed {
  std::unique_ptr<Region> region;
  Extent* part = nullptr;
  size_t bytes = 0;
  bool reusable = false;  // whether the part may serve again if it cannot be returned

  explicit operator bool() const { return region != nullptr || part != nullptr; }
};

// Not thread-safe. Of a region it calls only const functions; what must be returned is handed out
// as Reclaimed, so that the caller can return it without holding a lock.
class BlockHeap {
 public:
  explicit BlockHeap(size_t page_bytes);

  // The bytes a block for `bytes` occupies.
  size_t capacity_for(size_t bytes) const;

  // The largest pinned block that may serve a request of `capacity` bytes.
  static size_t largest_fit(size_t capacity);

  // A block from what is free, or null.
  Extent* reuse(size_t bytes);
  // The size of a region to map for `bytes` after a miss: with room for more small blocks, and the
  // least that is enough.
  size_t growth_for(size_t bytes) const;
  size_t least_growth_for(size_t bytes) const;
  // How far a growth would go beyond what the peak of live blocks needs, and how much of that could
  // be saved by returning free memory. Other threads are mapping `growing` bytes.
  size_t excess(size_t growth, size_t growing) const;
  size_t returnable_bytes() const;
  // Adds a region and takes a block from it. `region` is empty afterwards, or as before if this
  // throws. `rest` is what must be returned at once.
  Extent* adopt(std::unique_ptr<Region>& region, size_t bytes, Reclaimed& rest);

  // A block was dropped: it waits for the GPU, or is free (again).
  void wait(Extent* block, size_t bytes) noexcept;
  Reclaimed free_held(Extent* block, size_t bytes, bool displaced) noexcept;
  Reclaimed free_waiting(Extent* block, bool displaced) noexcept;

  // Takes free memory out, the regions unused for longest first: at least `bytes` if there is so
  // much. Parts smaller than `least_part` stay, because each hole may cost a mapping.
  std::vector<Reclaimed> collect(size_t bytes, size_t least_part);
  // A part was returned (`left`) or could not be. If only that part kept its region, returns the
  // rest of the region.
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
    size_t lost = 0;          // extents of it
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
  // What the last region was like. All regions of a source are alike, except those that spilled.
  size_t cut_bytes_ = 0;
  bool pinned_ = false;
  // False until a region has shown that any part of it keeps the rule; parts of a stripe do not.
  bool shares_regions_ = false;

  std::list<RegionArena> busy_;
  std::list<RegionArena> idle_;  // nothing taken; the longest unused first
  size_t idle_bytes_ = 0;
  std::list<SlabArena> slabs_;
  ExtentMap pages_;    // of regions that are cut
  ExtentMap singles_;  // of pinned regions made for one block
  ExtentMap small_;    // of slabs
  Statistics statistics_;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_BLOCK_HEAP_H_
