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

// Puts the indices of units into the queue of the node where their first keys are. `kernel` says
// which node that is, for at most 64 units; those in between go with the one before them. With a
// null kernel no queue is preferred.
WorkQueues<size_t> queues_of(const Attention& attention, const std::vector<Unit>& units,
                             const WorkerTeam& team, const os::Kernel* kernel);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_QUEUES_H_
