// Borrows the OpenMP threads of the process, where another library (such as torch) has loaded
// OpenMP.
//
// After each of torch's operations these threads spin for milliseconds and wait for the next one.
// Threads of our own would share the CPUs with them: an optimizer inside of a training step
// took 1.3 times as long.
#ifndef CXL_OFFLOAD_KERNELS_OPENMP_H_
#define CXL_OFFLOAD_KERNELS_OPENMP_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace cxl_offload::kernels {

// Runs job() on that many OpenMP threads, the caller among them, and returns when all are done.
// Returns false and runs nothing in three cases: no OpenMP is loaded; it has another number of
// threads (asking for another number makes and ends threads at each change); or this is a forked
// child, which has none of its parent's threads. A library that was loaded after the fork cannot
// know whether there were any, so it returns false too. Inside of a parallel region of OpenMP the
// caller alone may run the job. The job must not throw.
bool run_on_openmp(size_t threads, const std::function<void()>& job);

// Why SleepingWaits would do nothing; empty where it would not. It needs GNU's OpenMP and several
// CPUs, and an environment that says neither how threads wait (OMP_WAIT_POLICY, GOMP_SPINCOUNT) nor
// how large their stacks are (OMP_STACKSIZE, GOMP_STACKSIZE).
std::string why_openmp_cannot_sleep();

// While it lives, threads of OpenMP that wait look 100 times before they sleep, in all regions of
// the process, instead of 300,000 times. That is what GNU's OpenMP does where it has more threads
// than CPUs (its manual, GOMP_SPINCOUNT), so this holds a team that does nothing.
class SleepingWaits {
 public:
  // Does nothing where why_openmp_cannot_sleep(). Throws SystemError where the idle threads cannot
  // be made, one for every CPU, or the process has no room for 32 more; then it has changed
  // nothing.
  SleepingWaits();
  ~SleepingWaits();
  SleepingWaits(const SleepingWaits&) = delete;
  SleepingWaits& operator=(const SleepingWaits&) = delete;

 private:
  class Team;
  std::unique_ptr<Team> team_;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_OPENMP_H_
