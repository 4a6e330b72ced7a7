// Which units of attention every group of a team begins with.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_QUEUES_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_QUEUES_H_

#include <cstddef>
#include <vector>

#include "kernels/attention.h"
#include "kernels/attention_work.h"
#include "kernels/work_queues.h"
#include "kernels/worker_team.h"
#include "os/kernel.h"

namespace cxl_offload::kernels {

// Indices of units, in the queue of the node that their first keys are on, which `kernel` is asked
// for; null: nobody is asked. At most 64 units are asked for, and stand for those after them.
WorkQueues<size_t> queues_of(const Attention& attention, const std::vector<Unit>& units,
                             const WorkerTeam& team, const os::Kernel* kernel);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_QUEUES_H_
