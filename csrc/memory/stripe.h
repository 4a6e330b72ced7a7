// Turns weights into granules on nodes, as a pure function with exact shares.
#ifndef CXL_OFFLOAD_MEMORY_STRIPE_H_
#define CXL_OFFLOAD_MEMORY_STRIPE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "os/node_set.h"

namespace cxl_offload::memory {

struct Share {
  os::NodeId node = 0;
  uint32_t weight = 1;

  bool operator==(const Share&) const = default;
};

// Consecutive bytes of a range that belong on one node.
struct Run {
  size_t offset = 0;
  size_t bytes = 0;
  os::NodeId node = 0;

  bool operator==(const Run&) const = default;
};

// Weighted interleave. Whole granules go to nodes in cycles, as the kernel's own weighted
// interleave lays them out: with weights 4:2:1 the granules go to nodes 0 0 0 0 1 1 2. The granules
// that are left after the last whole cycle are shared out by largest remainder, and the earlier
// node wins ties. So the granules of each node are its largest-remainder share of all granules,
// whatever the size.
class Stripe {
 public:
  // Weights are divided by their greatest common divisor. Throws InvalidArgument on an empty list,
  // a weight of zero, a node given twice, a granule of zero, or a
  // cycle of more bytes than an address space has.
  Stripe(std::vector<Share> shares, size_t granule_bytes);

  const std::vector<Share>& shares() const { return shares_; }
  size_t granule_bytes() const { return granule_bytes_; }
  // Bytes after which the pattern starts anew: granule x sum of weights.
  size_t cycle_bytes() const { return granule_bytes_ * weight_sum_; }

  // Returns the bytes of every share in a range, without making the layout, which may be long.
  std::vector<size_t> bytes_of_shares(size_t bytes) const;
  // Returns the layout of a range, with neighbours on one node merged. The last granule may be a
  // part of one. Throws InvalidArgument for a range of more bytes than an address space has.
  std::vector<Run> runs(size_t bytes) const;
  // The share that gets the whole of an allocation of less than one cycle: that of the largest
  // weight, the earlier one of two.
  size_t heaviest() const;
  // Bytes of one allocation on every share's node, in the order of shares().
  std::vector<size_t> allocation_bytes(size_t bytes) const;
  // Whether `bytes` cut at `offset` out of a range of `total` bytes hold as many granules of every
  // node as a range of `bytes` of its own would.
  bool cut_keeps_shares(size_t total, size_t offset, size_t bytes) const;

 private:
  size_t granules_in(size_t bytes) const {
    return bytes / granule_bytes_ + (bytes % granule_bytes_ > 0);
  }
  // Granules of every share in the `tail` granules after the last whole cycle.
  std::vector<size_t> tail_granules(size_t tail) const;
  // Granules of every share among the first `count` of `granules`.
  std::vector<size_t> prefix_granules(size_t granules, size_t count) const;

  std::vector<Share> shares_;
  size_t granule_bytes_;
  size_t weight_sum_ = 0;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_STRIPE_H_
