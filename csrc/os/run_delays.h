// How long the threads of this process wait for a CPU while they could run.
#ifndef CXL_OFFLOAD_OS_RUN_DELAYS_H_
#define CXL_OFFLOAD_OS_RUN_DELAYS_H_

#include <cstdint>
#include <map>

namespace cxl_offload::os {

struct RunDelay {
  uint64_t waited_ns = 0;  // since the thread began
  uint64_t runs = 0;       // how often it was given a CPU
};

// By the number of the thread.
using RunDelays = std::map<int, RunDelay>;

// All threads of this process but the caller. Empty where the kernel does not count their waits
// (built without CONFIG_SCHED_INFO) or /proc is not there.
RunDelays read_run_delays();

// The most nanoseconds that one thread waited between two readings, without the first
// `wake_up_ns` of every wait, which a thread takes to wake on an idle CPU too. A thread that is
// missing before began between them, and one that is missing after has ended and counts for
// nothing.
uint64_t longest_wait(const RunDelays& before, const RunDelays& after, uint64_t wake_up_ns);

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_RUN_DELAYS_H_
