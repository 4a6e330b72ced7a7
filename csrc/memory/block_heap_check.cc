// Adds up the account of a heap again from its extents.
#include <stdexcept>
#include <string>

#include "memory/block_heap.h"

namespace cxl_offload::memory {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error("pool invariant: " + what);
}

void require_equal(uint64_t counted, uint64_t recorded, const std::string& what) {
  require(counted == recorded,
          what + ": counted " + std::to_string(counted) + ", recorded " + std::to_string(recorded));
}

}  // namespace

struct BlockHeap::Sums {
  Tally held, waiting, lost;
  size_t free_pages = 0, free_singles = 0, free_small = 0, free_extents = 0;
  size_t slab_bytes = 0, leaving = 0, idle_bytes = 0, mapped = 0;
};

// Checks that extents are in order, inside the arena and merged where they can be. Adds them to the
// sums.
// Long: one walk, which sums up as it checks.
void BlockHeap::check_extents(const Arena& arena, Sums& sums, bool small) const {
  size_t taken = 0;
  const Extent* previous = nullptr;
  for (const Extent* extent = arena.first; extent != nullptr; extent = extent->next) {
    require(extent->arena == &arena, "an extent names another arena");
    require(extent->previous == previous, "extents are not linked both ways");
    require(extent->bytes > 0, "an extent is empty");
    require(extent->begin >= arena.begin && extent->end() <= arena.begin + arena.bytes,
            "an extent leaves its arena");
    const bool free = extent->state == ExtentState::kFree;
    if (previous != nullptr) {
      require(previous->end() <= extent->begin, "extents overlap or are out of order");
      require(!free || previous->state != ExtentState::kFree || previous->end() < extent->begin,
              "two free neighbours were not merged");
    }
    taken += free ? 0 : 1;
    sums.free_extents += free ? 1 : 0;
    switch (extent->state) {
      case ExtentState::kFree:
        if (small) {
          sums.free_small += extent->bytes;
        } else {
          (static_cast<const RegionArena&>(arena).single ? sums.free_singles : sums.free_pages) +=
              extent->bytes;
        }
        break;
      case ExtentState::kHeld:
        sums.held.add(extent->bytes);
        break;
      case ExtentState::kWaiting:
        sums.waiting.add(extent->bytes);
        break;
      case ExtentState::kLeaving:
        sums.leaving += extent->bytes;
        break;
      case ExtentState::kLost:
        sums.lost.add(extent->bytes);
        break;
    }
    previous = extent;
  }
  require_equal(taken, arena.taken, "taken extents of an arena");
}

void BlockHeap::check_invariants() const {
  Sums sums;
  for (const auto* regions : {&busy_, &idle_}) {
    for (const RegionArena& arena : *regions) {
      check_extents(arena, sums, false);
      require((regions == &idle_) == arena.idle, "a region is in the wrong list");
      require(!arena.idle || arena.taken == 0, "an idle region has taken extents");
      require(arena.idle || arena.taken > arena.lost, "a region with nothing in use is not idle");
      sums.mapped += arena.mapped_bytes;
      sums.idle_bytes += arena.idle ? arena.mapped_bytes : 0;
    }
  }
  for (const SlabArena& slab : slabs_) {
    check_extents(slab, sums, true);
    require(slab.taken > 0, "an empty slab was kept");
    require(slab.pages->begin == slab.begin && slab.pages->state == ExtentState::kHeld,
            "a slab without its pages");
    // The blocks of a slab are held, not its pages.
    sums.held.subtract(slab.bytes);
    sums.slab_bytes += slab.bytes;
  }
  const size_t free_bytes = sums.free_pages + sums.free_singles + sums.free_small;
  require_equal(sums.free_pages, pages_.free_bytes(), "free bytes of shared regions");
  require_equal(sums.free_singles, singles_.free_bytes(), "free bytes of single regions");
  require_equal(sums.free_small, small_.free_bytes(), "free bytes of slabs");
  require_equal(sums.idle_bytes, idle_bytes_, "idle bytes");
  require_equal(sums.held.bytes.current, statistics_.held.bytes.current, "held bytes");
  require_equal(sums.held.count.current, statistics_.held.count.current, "held blocks");
  require_equal(sums.held.count.current, statistics_.asked.count.current, "allocations");
  require_equal(sums.waiting.bytes.current, statistics_.waiting.bytes.current, "waiting bytes");
  require_equal(sums.lost.bytes.current, statistics_.lost.bytes.current, "lost bytes");
  require_equal(free_bytes, statistics_.cached.bytes.current, "cached bytes");
  require_equal(sums.free_extents, statistics_.cached.count.current, "cached extents");
  require_equal(sums.mapped, statistics_.mapped.bytes.current, "mapped bytes");
  require_equal(busy_.size() + idle_.size(), statistics_.mapped.count.current, "regions");
  require_equal(
      sums.held.bytes.current + sums.waiting.bytes.current + free_bytes + sums.lost.bytes.current,
      sums.mapped, "held + waiting + cached + lost against mapped");
}

}  // namespace cxl_offload::memory
