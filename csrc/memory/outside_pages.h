// Places pages that somebody else mapped, such as those of a file in shared memory, by a rule.
#ifndef CXL_OFFLOAD_MEMORY_OUTSIDE_PAGES_H_
#define CXL_OFFLOAD_MEMORY_OUTSIDE_PAGES_H_

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "memory/numa_region.h"
#include "memory/rule.h"

namespace cxl_offload::memory {

// `count` parts of `part_bytes` each inside `range`, with `stride_bytes` from one to the next. They
// are laid out together, so a stripe goes on from part to part.
struct Parts {
  std::span<std::byte> range;
  size_t part_bytes;
  size_t stride_bytes;
  size_t count;
};

// Faults the parts in by the rule, and checks the pages. They are not charged to the budget,
// because the owner of the mapping returns them. Returns what the user should know of the places.
// Throws InvalidArgument for parts that are no whole pages of the range, for a device and for a bad
// rule; OutOfMemory, naming the node, where a node has no room; SystemError. Pages that were
// faulted in before a throw stay.
std::vector<std::string> place_outside(const Placer& placer, const Rule& rule, const Parts& parts);

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_OUTSIDE_PAGES_H_
