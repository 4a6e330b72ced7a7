#include "transfer/copy_team.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/cpus.h"
#include "core/error.h"
#include "core/threads.h"

namespace cxl_offload::transfer {

// The helpers of one process.
class CopyTeam::Crew {
 public:
  explicit Crew(const std::vector<int>& cpus) {
    try {
      start(cpus);
    } catch (...) {
      dismiss();
      throw;
    }
  }
  ~Crew() { dismiss(); }

  void share_out(size_t pieces, size_t helpers, const std::function<void(size_t)>& work) {
    const std::lock_guard sharing(sharing_);
    {
      const std::lock_guard lock(mutex_);
      work_ = &work;
      pieces_ = pieces;
      wanted_ = helpers;
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

 private:
  void start(const std::vector<int>& cpus) {
    helpers_.reserve(cpus.size());
    for (size_t i = 0; i < cpus.size(); ++i) {
      helpers_.push_back(start_thread("copy with " + std::to_string(cpus.size()) + " helpers",
                                      [this, i, cpu = cpus[i]] { help(i, cpu); }));
    }
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return ready_ == helpers_.size(); });
    if (refused_ != 0) {
      throw SystemError(refused_, std::string("bind the helpers of a copier: ") +
                                      std::strerror(refused_) + "; name CPUs of this process");
    }
  }

  void dismiss() noexcept {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    start_.notify_all();
    helpers_.clear();  // joins them
  }

  void drain() {
    for (size_t i = next_++; i < pieces_; i = next_++) (*work_)(i);
  }

  void help(size_t number, int cpu) {
    const int refused = bind_thread({cpu});
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    if (refused != 0) refused_ = refused;
    ++ready_;
    done_.notify_all();
    for (;;) {
      start_.wait(lock, [&] { return ending_ || round_ != seen; });
      if (ending_) return;
      seen = round_;
      if (number >= wanted_) continue;
      ++busy_;
      lock.unlock();
      drain();
      lock.lock();
      if (--busy_ == 0) done_.notify_all();
    }
  }

  std::mutex sharing_;  // held by the thread that shares out pieces

  std::mutex mutex_;  // guards what follows
  std::condition_variable start_;
  std::condition_variable done_;
  const std::function<void(size_t)>* work_ = nullptr;
  size_t pieces_ = 0;
  size_t wanted_ = 0;  // helpers that may join
  size_t busy_ = 0;    // helpers that have joined
  size_t ready_ = 0;   // helpers that were made
  int refused_ = 0;    // errno of a helper that could not be bound
  uint64_t round_ = 0;
  bool ending_ = false;

  std::atomic<size_t> next_{0};
  std::vector<std::jthread> helpers_;
};

CopyTeam::CopyTeam(const std::vector<int>& helper_cpus)
    : helpers_(helper_cpus.size()),
      crew_((check_cpus("copy", helper_cpus), std::make_unique<Crew>(helper_cpus))) {}

CopyTeam::~CopyTeam() = default;

void CopyTeam::share_out(size_t pieces, size_t threads, const std::function<void(size_t)>& work) {
  const size_t wanted = std::min({threads, pieces, this->threads()});
  Crew* crew = wanted > 1 ? crew_.here() : nullptr;
  if (crew != nullptr) return crew->share_out(pieces, wanted - 1, work);
  for (size_t i = 0; i < pieces; ++i) work(i);
}

}  // namespace cxl_offload::transfer
