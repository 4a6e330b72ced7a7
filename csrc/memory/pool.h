// A cache of blocks over one source of regions: one placement rule, one kind of page, pinned or
// not.
//
// Exact sizes: a block of a page or more owns whole pages; smaller ones share the pages of slabs.
// Free blocks are split and merged inside their region and found by best fit in O(log n). What is
// mapped stays within 1/128 (and 64 KiB or a page) of what the peak of live blocks needs, because a
// miss first gives back what is free beyond that; only free memory that cannot be given back
// piece by piece (holes below 64 KiB, parts of pinned regions) comes on top. A pinned region is
// registered and returned as a whole. One that was made for a single block serves blocks of that
// size (or up to 1/256 smaller) and is returned when another size is needed. Only chunks for small
// blocks are shared.
#ifndef CXL_OFFLOAD_MEMORY_POOL_H_
#define CXL_OFFLOAD_MEMORY_POOL_H_

#include <cstddef>
#include <memory>
#include <string>

#include "core/fork_guard.h"
#include "gpu/driver.h"
#include "memory/allocation.h"
#include "memory/region.h"
#include "memory/statistics.h"

namespace cxl_offload::memory {

struct Trimmed {
  size_t bytes = 0;
  std::string kept_because;  // what the GPU's driver said, where blocks it may still use stay
};

// Thread-safe. The lock is never held while memory is mapped, populated or returned, nor while the
// GPU driver is called. Make it with std::make_shared: its allocations keep it alive.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // With a driver, the source's regions are expected to be pinned and their reuse waits for the
  // GPU.
  explicit Pool(std::shared_ptr<RegionSource> source,
                std::shared_ptr<gpu::GpuDriver> driver = nullptr);
  // Waits for the GPU, then returns every page.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Throws what RegionSource::obtain throws; OutOfMemory only after everything cached was given
  // back. In a forked child: InvalidArgument.
  //
  // A block smaller than a page lies on the node of its slab. A stripe over nodes has no meaning
  // for so few bytes: send allocations smaller than one cycle to a pool whose rule has one node.
  std::shared_ptr<Allocation> allocate(size_t bytes);
  // Waits for the GPU and returns all free memory that can be returned. Does nothing in a forked
  // child.
  Trimmed trim();
  // As trim, but whatever the GPU driver says; then waits until other threads have returned what
  // they are returning.
  void give_back() noexcept;
  // All zero in a forked child.
  Statistics statistics() const;
  size_t page_bytes() const;

  // For tests: throws std::logic_error naming the first thing that does not add up.
  void check_invariants() const;

 private:
  friend class Allocation;
  struct State;

  bool waits_for_gpu() const;
  Region* region_of(const Extent& block) const;
  void take_back(Allocation& allocation) noexcept;

  const ProcessOwned<State> state_;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_POOL_H_
