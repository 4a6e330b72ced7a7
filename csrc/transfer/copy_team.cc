#include "transfer/copy_team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.h"

namespace cxl_offload {
namespace {

void check_allowed(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  for (const int cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &allowed)) {
      throw InvalidArgument("copy with CPU " + std::to_string(cpu) +
                            ": this process may not run there; name CPUs of its affinity mask");
    }
  }
}

void pin_to(std::thread& thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
}

}  // namespace

CopyTeam::CopyTeam(const std::vector<int>& helper_cpus) {
  check_allowed(helper_cpus);
  helpers_.reserve(helper_cpus.size());
  for (size_t i = 0; i < helper_cpus.size(); ++i) {
    helpers_.emplace_back([this, i] { help(i); });
    pin_to(helpers_.back(), helper_cpus[i]);
  }
}

CopyTeam::~CopyTeam() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  start_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void CopyTeam::share_out(size_t pieces, size_t threads, const std::function<void(size_t)>& work) {
  const size_t wanted = std::min({threads, pieces, this->threads()});
  if (wanted <= 1) {
    for (size_t i = 0; i < pieces; ++i) work(i);
    return;
  }
  const std::lock_guard sharing(sharing_);
  {
    const std::lock_guard lock(mutex_);
    work_ = &work;
    pieces_ = pieces;
    wanted_ = wanted - 1;
    next_ = 0;
    ++round_;
  }
  start_.notify_all();
  drain();
  std::unique_lock lock(mutex_);
  wanted_ = 0;  // helpers that have not woken yet have nothing left to do
  done_.wait(lock, [&] { return busy_ == 0; });
  work_ = nullptr;
}

void CopyTeam::drain() {
  for (size_t i = next_++; i < pieces_; i = next_++) (*work_)(i);
}

void CopyTeam::help(size_t number) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return ending_ || round_ != seen; });
    if (ending_) return;
    seen = round_;
    if (number >= wanted_) continue;
    ++busy_;
    lock.unlock();
    drain();
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

}  // namespace cxl_offload
