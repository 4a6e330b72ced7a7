// Parallel fault-in of planned runs, each page's node checked afterwards.
#ifndef CXL_OFFLOAD_MEMORY_FAULT_IN_H_
#define CXL_OFFLOAD_MEMORY_FAULT_IN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memory/run_map.h"
#include "memory/stripe.h"
#include "os/kernel.h"

namespace cxl_offload::memory {

// How fault-in or a move ended.
struct Placed {
  std::vector<Run> runs;      // as they are in the end, in order
  uint64_t shared_bytes = 0;  // not moved, for a forked child has them as well
};

// Faults every run in on its node. Pages that landed elsewhere (the kernel passes a full node over
// silently, and prefers another node to dropping page cache) are moved to their node, which makes
// the kernel drop page cache there but never kill. The runs returned equal `runs` when everything
// went to plan. Throws what the kernel throws, and
// Interrupted; pages already there stay, for the caller to unmap.
Placed fault_in(os::Kernel& kernel, std::span<std::byte> range, const std::vector<Run>& runs,
                size_t page_bytes, size_t max_threads);

// Moves every page of the runs to their nodes. Throws as fault_in.
Placed move_to_runs(os::Kernel& kernel, std::span<std::byte> range, const std::vector<Run>& runs,
                    size_t page_bytes);

// Which node every part of the range is on, asked from the pages; absent ones under -1.
std::vector<Run> query_runs(const os::Kernel& kernel, std::span<const std::byte> range,
                            size_t page_bytes);

// The same, asked again a few times where pages are absent: for a moment, a page that the kernel
// moves does not show.
std::vector<Run> look_for_runs(const os::Kernel& kernel, std::span<const std::byte> range,
                               size_t page_bytes);

// Bytes of any range on every node, asked from the pages; pages not faulted in count under node
// -1. The range may begin and end inside a page.
NodeBytes query_bytes(const os::Kernel& kernel, std::span<const std::byte> range,
                      size_t page_bytes);

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_FAULT_IN_H_
