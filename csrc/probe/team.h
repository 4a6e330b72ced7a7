// Threads pinned to CPUs that start together.
#ifndef CXL_OFFLOAD_PROBE_TEAM_H_
#define CXL_OFFLOAD_PROBE_TEAM_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

namespace cxl_offload::probe {

using Clock = std::chrono::steady_clock;

inline Clock::duration from_seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// The window that is timed: `seconds` of the common clock, after a warm-up. The warm-up also covers
// the time until the last thread is awake.
struct Window {
  double warmup_s = 0;
  double seconds = 0;
};

// Throws InvalidArgument unless both are finite, not negative and at most an hour.
void check_window(const Window& window);

// Runs job(i, start) on a thread pinned to cpus[i]; `start` is the moment when the last of them
// was ready. CPUs may be named twice. When a thread cannot be made or pinned no job runs. Rethrows
// the first exception of a job. Throws InvalidArgument for no CPU or one that is not allowed.
void run_team(const std::vector<int>& cpus,
              const std::function<void(size_t, Clock::time_point)>& job);

}  // namespace cxl_offload::probe

#endif  // CXL_OFFLOAD_PROBE_TEAM_H_
