// Which units of attention every group of a team begins with.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_QUEUES_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_QUEUES_H_

#include <atomic>
#include <cstddef>
#include <vector>

#include "kernels/attention.h"
#include "kernels/attention_work.h"
#include "kernels/worker_team.h"
#include "os/kernel.h"

namespace cxl_offload {

// Indices of units, for the threads of one group and for those of others that are done.
struct UnitQueue {
  std::vector<size_t> units;
  std::atomic<size_t> next = 0;
};

// A queue for each group. Units go to the group of the node that their first keys are on, which
// `kernel` is asked for; and round the groups where there is no such node, or nobody to ask (null).
// At most 64 units are asked for, and stand for those after them.
std::vector<UnitQueue> queues_of(const Attention& attention, const std::vector<Unit>& units,
                                 const WorkerTeam& team, const Kernel* kernel);

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_QUEUES_H_
