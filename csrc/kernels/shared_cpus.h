// Where other programs want the CPUs, threads of OpenMP that wait sleep instead of spin.
//
// At the end of a parallel region threads wait for the slowest, and between two regions for the
// next one. GNU's OpenMP spins for milliseconds before it sleeps. On CPUs of its own that is best:
// waking a thread takes longer than the wait. But where another program wants a CPU too, a thread
// that spins keeps it from the very thread that it waits for, for a whole time slice and at every
// region: on two CPUs decoding took 15 times as long beside one busy thread, and twice as long
// where the waiting threads slept (docs/shared-cpus.md).
#ifndef CXL_OFFLOAD_KERNELS_SHARED_CPUS_H_
#define CXL_OFFLOAD_KERNELS_SHARED_CPUS_H_

#include <memory>
#include <string>

namespace cxl_offload::kernels {

// Says when waiting threads should sleep, from how long threads had no CPU.
class SharingJudge {
 public:
  // `waited`: the part of the time since the last call in which the thread that waited longest
  // could have run and had no CPU. `now` in seconds, of any clock that only rises. Returns whether
  // waiting threads should sleep from now on.
  bool judge(double waited, double now);

 private:
  bool sleep_ = false;
  bool was_busy_ = false;  // at the last call
  double busy_at_ = 0;     // when a thread had no CPU last
  double spins_since_ = -1e9;
  double quiet_for_ = 0;  // how long every thread must have had a CPU before they spin again
};

// A thread that looks twenty times a second or less often, for as long as this lives.
class SharedCpus {
 public:
  // Does nothing where why_openmp_cannot_sleep() (kernels/openmp.h), the kernel does not count how
  // long threads wait, or no further thread can be made.
  SharedCpus();
  ~SharedCpus();
  SharedCpus(const SharedCpus&) = delete;
  SharedCpus& operator=(const SharedCpus&) = delete;

  // For how many seconds waiting threads slept instead of spun, so far.
  double sleeping_seconds() const;

  // Why nothing is done; empty while CPUs are looked at.
  std::string why_off() const;

 private:
  class Watch;
  std::string why_off_;  // where there is no watch
  std::unique_ptr<Watch> watch_;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_SHARED_CPUS_H_
