// Faults planned runs in with several threads, and checks the node of each page afterwards.
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
  uint64_t shared_bytes = 0;  // not moved, because a forked child has them as well
};

// Faults every run in on its node. The kernel silently passes over a full node, and prefers another
// node to dropping page cache. Pages that landed elsewhere are therefore moved to their node: for a
// move the kernel drops page cache there, and it never kills a process. The runs returned equal
// `runs` when everything went as planned. Throws what the kernel throws, and Interrupted; pages
// already faulted in stay, for the caller to unmap.
Placed fault_in(os::Kernel& kernel, std::span<std::byte> range, const std::vector<Run>& runs,
                size_t page_bytes, size_t max_threads);

// Moves every page of the runs to their nodes. Throws as fault_in.
Placed move_to_runs(os::Kernel& kernel, std::span<std::byte> range, const std::vector<Run>& runs,
                    size_t page_bytes);

// Asks the pages which node every part of the range is on. Absent pages are on node -1.
std::vector<Run> query_runs(const os::Kernel& kernel, std::span<const std::byte> range,
                            size_t page_bytes);

// Does the same, but asks again a few times where pages are absent. The kernel reports a page as
// absent for a moment while it moves the page.
std::vector<Run> look_for_runs(const os::Kernel& kernel, std::span<const std::byte> range,
                               size_t page_bytes);

// Asks the pages how many bytes of any range are on every node. Pages that are not faulted in count
// for node -1. The range may begin and end inside a page.
NodeBytes query_bytes(const os::Kernel& kernel, std::span<const std::byte> range,
                      size_t page_bytes);

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_FAULT_IN_H_
