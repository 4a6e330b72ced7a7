// Keeps signals from outside (Ctrl-C, timers) away from threads of the core.
#ifndef CXL_OFFLOAD_CORE_SIGNALS_H_
#define CXL_OFFLOAD_CORE_SIGNALS_H_

#include <pthread.h>
#include <signal.h>

namespace cxl_offload {

// While it lives, this thread and the threads that it makes are given no such signal; a new thread
// keeps that to its end. The kernel gives a signal to any thread that takes it, and Python looks
// for them in its main thread: one that another thread is given there can be seconds late. Signals
// of faults stay, because a thread that blocks its own ends the process.
class NoSignals {
 public:
  NoSignals() noexcept {
    sigset_t from_outside;
    sigfillset(&from_outside);
    for (const int fault : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP}) {
      sigdelset(&from_outside, fault);
    }
    pthread_sigmask(SIG_BLOCK, &from_outside, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_SIGNALS_H_
