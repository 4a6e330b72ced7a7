// The inner loop of the simulator: when the jobs of each step begin and end.
//
// A step begins when the step before it has ended. Inside a step, queues run side by side, and each
// runs its jobs in order. A job is first a set-up, which occupies its queue and no resource, and
// then work, which shares resources with all other work (replay/sharing.h).
#ifndef CXL_OFFLOAD_REPLAY_STEPS_H_
#define CXL_OFFLOAD_REPLAY_STEPS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "replay/sharing.h"

namespace cxl_offload::replay {

// All jobs of a trace, in the order of their steps and, inside a step, of their queues.
struct Jobs {
  std::span<const double> setup_s;
  std::span<const double> alone_s;  // the work's seconds when nothing else is at work
  // Job i uses resources[demand_begins[i]] to resources[demand_begins[i + 1] - 1].
  std::span<const int64_t> demand_begins;
  std::span<const int32_t> resources;
  std::span<const double> shares;
  std::span<const int64_t> queue_begins;  // first job of every queue, and one past the last
  std::span<const int64_t> step_begins;   // first queue of every step, and one past the last
};

struct Times {
  std::span<double> starts_s;  // of jobs, from their step's begin on
  std::span<double> ends_s;
  std::span<double> step_s;  // lengths of the steps
};

// Throws InvalidArgument, before anything is computed, when lengths, order or numbers do not fit.
void run_steps(const Jobs& jobs, const std::vector<double>& losses, const Times& times);

}  // namespace cxl_offload::replay

#endif  // CXL_OFFLOAD_REPLAY_STEPS_H_
