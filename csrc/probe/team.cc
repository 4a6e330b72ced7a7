#include "probe/team.h"

#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "core/cpus.h"
#include "core/error.h"
#include "core/signals.h"

namespace cxl_offload::probe {
namespace {

constexpr double kLongestWindowS = 3600;

void pin_to(int cpu) {
  if (const int code = bind_thread({cpu}); code != 0) {
    throw SystemError(code, "pin a thread to CPU " + std::to_string(cpu) + ": " +
                                std::strerror(code) + "; name a CPU of this process's cpuset");
  }
}

// Where the threads of a team wait for each other. A thread that failed arrives too, and then no
// thread goes on.
class StartLine {
 public:
  explicit StartLine(size_t threads) : missing_(threads) {}

  // It is null when the team does not start.
  const Clock::time_point* arrive(bool ready) {
    std::unique_lock lock(mutex_);
    failed_ = failed_ || !ready;
    if (--missing_ == 0) {
      start_ = Clock::now();
      all_there_.notify_all();
    }
    all_there_.wait(lock, [this] { return missing_ == 0; });
    return failed_ ? nullptr : &start_;
  }
  // Arrives in place of `threads` that could not be made.
  void give_up(size_t threads) {
    std::lock_guard lock(mutex_);
    failed_ = true;
    missing_ -= threads;
    if (missing_ == 0) all_there_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_there_;
  size_t missing_;
  bool failed_ = false;
  Clock::time_point start_;
};

class FirstError {
 public:
  void keep(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

void check_window(const Window& window) {
  for (double seconds : {window.warmup_s, window.seconds}) {
    if (std::isfinite(seconds) && seconds >= 0 && seconds <= kLongestWindowS) continue;
    throw InvalidArgument("a window of " + std::to_string(window.seconds) + " s after " +
                          std::to_string(window.warmup_s) + " s: both are 0 to 3600 s");
  }
}

void run_team(const std::vector<int>& cpus,
              const std::function<void(size_t, Clock::time_point)>& job) {
  if (cpus.empty()) throw InvalidArgument("run threads: no CPU given; name at least one");
  check_cpus("run threads", cpus);
  StartLine line(cpus.size());
  FirstError error;
  const auto run_one = [&](size_t index) {
    bool ready = true;
    try {
      pin_to(cpus[index]);
    } catch (...) {
      error.keep(std::current_exception());
      ready = false;
    }
    const Clock::time_point* start = line.arrive(ready);
    if (start == nullptr) return;
    try {
      job(index, *start);
    } catch (...) {
      error.keep(std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(cpus.size());
  try {
    const NoSignals here;
    for (size_t i = 0; i < cpus.size(); ++i) threads.emplace_back(run_one, i);
  } catch (const std::system_error& refused) {
    line.give_up(cpus.size() - threads.size());
    error.keep(std::make_exception_ptr(SystemError(
        refused.code().value(), "start " + std::to_string(cpus.size()) + " threads: only " +
                                    std::to_string(threads.size()) +
                                    " could be made; raise the limit of processes (ulimit -u)")));
  }
  for (std::thread& thread : threads) thread.join();
  error.rethrow();
}

}  // namespace cxl_offload::probe
