// A region: one mapping whose pages keep one placement rule. Pools cut regions into blocks.
#ifndef CXL_OFFLOAD_MEMORY_REGION_H_
#define CXL_OFFLOAD_MEMORY_REGION_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "memory/stripe.h"

namespace cxl_offload::memory {

class NumaRegion;
class PinnedRegion;

class Region {
 public:
  virtual ~Region() = default;  // returns every page that release() has not returned

  virtual std::span<std::byte> range() const = 0;
  // The unit in which pieces may be released.
  virtual size_t page_bytes() const = 0;
  // The unit in which parts of a block move. It is larger than page_bytes() where the kernel may
  // have made huge pages.
  virtual size_t unit_bytes() const { return page_bytes(); }
  // Whether it is registered with a GPU driver as one, and so never returned in parts.
  virtual bool pinned() const = 0;
  // Whether it is registered now. A move that failed may have left it unregistered.
  virtual bool registered() const { return pinned(); }
  // Whether a block cut at [offset, offset + bytes) has exactly the shares of nodes that a fresh
  // region of `bytes` would have. Always true for rules that name a single node.
  virtual bool keeps_rule(size_t offset, size_t bytes) const = 0;
  // The first offset >= `offset` at which the rule's pattern starts anew (a multiple of the
  // stripe's cycle; of the page for single-node rules).
  virtual size_t next_cut(size_t offset) const = 0;
  // Returns whole pages early. Pinned regions refuse this, because they are registered as one.
  virtual void release(size_t offset, size_t bytes) = 0;
  // Which node each part of [offset, offset + bytes) was put on, offsets counted from `offset`;
  // empty where the region does not know.
  virtual std::vector<Run> runs(size_t, size_t) const { return {}; }
  // The Device-DAX device it is on; empty for memory of nodes.
  virtual std::string device() const { return ""; }
  // The memory of NUMA nodes that this region is or registers, whose pages can move; null for
  // memory of a device.
  virtual NumaRegion* on_nodes() { return nullptr; }
  // This region where it has to be unregistered before its pages move; else null.
  virtual PinnedRegion* as_pinned() { return nullptr; }
  // What the user should know of this region: spilled nodes, pages that pinning moved.
  virtual std::vector<std::string> notes() const { return {}; }
};

// Where a pool's regions come from.
class RegionSource {
 public:
  virtual ~RegionSource() = default;
  // What blocks are cut in: pages, or the larger ones that they may turn out to be parts of.
  virtual size_t page_bytes() const = 0;
  // A region of at least `bytes`, rounded up to whole pages. Throws OutOfMemory, SystemError or
  // PlacementError; on throw nothing is left.
  virtual std::unique_ptr<Region> obtain(size_t bytes) = 0;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_REGION_H_
