// Makes the runs of one allocation from a rule and the room on the nodes.
#ifndef CXL_OFFLOAD_MEMORY_LAYOUT_H_
#define CXL_OFFLOAD_MEMORY_LAYOUT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "memory/node_budget.h"
#include "memory/rule.h"
#include "memory/stripe.h"
#include "os/kernel.h"

namespace cxl_offload::memory {

struct Layout {
  std::vector<Run> runs;
  std::vector<std::string> notes;  // where it differs from the rule, and why
};

// Memory that is never taken, so that the kernel never has to kill a process: `fraction` of a node,
// at least `min_bytes` and at most `max_bytes`.
struct Reserve {
  double fraction = 1.0 / 128;
  uint64_t min_bytes = uint64_t{16} << 20;
  uint64_t max_bytes = uint64_t{1} << 30;

  uint64_t of(uint64_t total_bytes) const;
};

// Lays `bytes` (whole pages) out by the rule. Throws OutOfMemory, naming every node that lacks
// room, before anything is mapped. A rule of first touch has no runs. `held` is what the same bytes
// occupy already, when they are about to move: it counts as free.
Layout lay_out(const Rule& rule, size_t bytes, const os::Kernel& kernel, const NodeBudget& budget,
               const Reserve& reserve, const NodeBytes& held = {});

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_LAYOUT_H_
