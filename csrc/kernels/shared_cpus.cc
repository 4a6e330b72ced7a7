#include "kernels/shared_cpus.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/fork_guard.h"
#include "core/threads.h"
#include "kernels/openmp.h"
#include "os/run_delays.h"

namespace cxl_offload::kernels {
namespace {

// Parts of a look. Beside a busy program a spinning thread has no CPU for half of the time; without
// one, for less than a tenth.
constexpr double kBusy = 0.2;
constexpr double kQuiet = 0.1;
// Twice as long after each time that spinning was a mistake, up to the longest.
constexpr double kShortestQuietSeconds = 0.5;
constexpr double kLongestQuietSeconds = 16;

// Between two looks: so long, or longer where a look at very many threads would take more than a
// hundredth of a CPU.
constexpr std::chrono::milliseconds kLook{50};
constexpr int kLeastIdle = 100;

// A thread that sleeps wakes up within this on an idle CPU, also one of a virtual machine, which
// the hypervisor has to wake too (60 to 180 us measured). A time slice of another is some ms.
constexpr uint64_t kWakeUpNs = 200'000;

}  // namespace

bool SharingJudge::judge(double waited, double now) {
  if (sleep_) {
    if (waited >= kQuiet) busy_at_ = now;
    if (now - busy_at_ >= quiet_for_) {
      sleep_ = false;
      spins_since_ = now;
    }
    was_busy_ = false;
    return sleep_;
  }
  const bool is_busy = waited >= kBusy;
  if (is_busy && was_busy_) {  // twice in a row: not a program that needed a moment
    const bool was_a_mistake = now - spins_since_ < quiet_for_;
    quiet_for_ =
        was_a_mistake ? std::min(2 * quiet_for_, kLongestQuietSeconds) : kShortestQuietSeconds;
    sleep_ = true;
    busy_at_ = now;
  }
  was_busy_ = is_busy;
  return sleep_;
}

class SharedCpus::Watch {
 public:
  Watch()
      : thread_(start_thread("see whether other programs want the CPUs",
                             [this](const std::stop_token& stop) { watch(stop); })) {}

  // A forked child does not have the thread, and does not wait for it.
  bool in_child() const { return guard_.in_child(); }

  std::string why_off() const {
    if (in_child()) return "this process was forked";
    const std::lock_guard lock(slept_mutex_);
    return why_off_;
  }

  double sleeping_seconds() const {
    if (in_child()) return 0;  // the parent's thread may have held the lock
    const std::lock_guard lock(slept_mutex_);
    const Clock::duration now = asleep_since_ ? Clock::now() - *asleep_since_ : Clock::duration{};
    return std::chrono::duration<double>(slept_ + now).count();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void watch(const std::stop_token& stop) {
    std::unique_ptr<SleepingWaits> sleeping;
    SharingJudge judge;
    os::RunDelays before = os::read_run_delays();
    if (before.empty()) return give_up("the kernel does not count how long threads wait");
    Clock::time_point at = Clock::now();
    std::unique_lock lock(mutex_);
    Clock::duration pause = kLook;
    while (!wake_.wait_for(lock, stop, pause, [] { return false; }) && !stop.stop_requested()) {
      const Clock::time_point began = Clock::now();
      os::RunDelays after = os::read_run_delays();
      const Clock::time_point now = Clock::now();
      pause = std::max<Clock::duration>(kLook, kLeastIdle * (now - began));
      const double seconds = std::chrono::duration<double>(now - at).count();
      const double waited =
          1e-9 * static_cast<double>(os::longest_wait(before, after, kWakeUpNs)) / seconds;
      const bool sleep =
          judge.judge(waited, std::chrono::duration<double>(now.time_since_epoch()).count());
      if (sleep != (sleeping != nullptr) && !change(sleeping, sleep)) return;
      before = std::move(after);
      at = now;
    }
  }

  void give_up(std::string why) {
    const std::lock_guard lock(slept_mutex_);
    why_off_ = std::move(why);
  }

  // Returns false where the idle threads cannot be made: then all spin, as without this object.
  bool change(std::unique_ptr<SleepingWaits>& sleeping, bool sleep) {
    try {
      sleeping = sleep ? std::make_unique<SleepingWaits>() : nullptr;
    } catch (const SystemError& error) {
      give_up(error.what());
      return false;
    }
    const std::lock_guard lock(slept_mutex_);
    if (asleep_since_) slept_ += Clock::now() - *asleep_since_;
    asleep_since_.reset();
    if (sleep) asleep_since_ = Clock::now();
    return true;
  }

  const ForkGuard guard_;
  mutable std::mutex slept_mutex_;
  Clock::duration slept_{};  // until threads spun again
  std::optional<Clock::time_point> asleep_since_;
  std::string why_off_;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::jthread thread_;  // last: it uses the others
};

SharedCpus::SharedCpus() : why_off_(why_openmp_cannot_sleep()) {
  if (!why_off_.empty()) return;
  try {
    watch_ = std::make_unique<Watch>();
  } catch (const SystemError& error) {
    why_off_ = error.what();  // threads spin, as without this object
  }
}

SharedCpus::~SharedCpus() {
  if (watch_ != nullptr && watch_->in_child()) static_cast<void>(watch_.release());
}

std::string SharedCpus::why_off() const { return watch_ == nullptr ? why_off_ : watch_->why_off(); }

double SharedCpus::sleeping_seconds() const {
  return watch_ == nullptr ? 0 : watch_->sleeping_seconds();
}

}  // namespace cxl_offload::kernels
