#include "probe/team.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "core/error.h"

namespace cxl_offload {
namespace {

constexpr double kLongestWindowS = 3600;

// A CPU mask of any width: machines with more than 1024 CPUs exist.
class CpuMask {
 public:
  explicit CpuMask(size_t cpus) : cpus_(cpus), mask_(CPU_ALLOC(cpus), &free_mask) {
    if (!mask_) throw OutOfMemory("a mask of " + std::to_string(cpus) + " CPUs: no memory");
    CPU_ZERO_S(bytes(), mask_.get());
  }
  size_t cpus() const { return cpus_; }
  size_t bytes() const { return CPU_ALLOC_SIZE(cpus_); }
  cpu_set_t* get() const { return mask_.get(); }
  bool contains(int cpu) const { return CPU_ISSET_S(cpu, bytes(), mask_.get()); }
  void insert(int cpu) { CPU_SET_S(cpu, bytes(), mask_.get()); }

 private:
  static void free_mask(cpu_set_t* mask) { CPU_FREE(mask); }

  size_t cpus_;
  std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask_;
};

void pin_to(int cpu) {
  CpuMask mask(static_cast<size_t>(cpu) + 1);
  mask.insert(cpu);
  if (sched_setaffinity(0, mask.bytes(), mask.get()) != 0) {
    const int code = errno;
    throw SystemError(code, "pin a thread to CPU " + std::to_string(cpu) + ": " +
                                std::strerror(code) + "; name a CPU of this process's cpuset");
  }
}

void check_cpus(const std::vector<int>& cpus) {
  if (cpus.empty()) throw InvalidArgument("run threads: no CPU given; name at least one");
  const std::vector<int> allowed = allowed_cpus();
  for (int cpu : cpus) {
    if (std::ranges::binary_search(allowed, cpu)) continue;
    throw InvalidArgument("run a thread on CPU " + std::to_string(cpu) + ": this process may use " +
                          std::to_string(allowed.size()) + " CPUs, from " +
                          std::to_string(allowed.front()) + " to " +
                          std::to_string(allowed.back()) + "; name one of those");
  }
}

// Where the threads of a team wait for each other. One that failed arrives as well, and then
// nobody goes on.
class StartLine {
 public:
  explicit StartLine(size_t threads) : missing_(threads) {}

  // Null when the team does not start.
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
  // In place of `threads` that never came to life.
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

std::vector<int> allowed_cpus() {
  // The call fails with EINVAL while the mask is narrower than the kernel's own.
  for (size_t cpus = 1024; cpus <= (size_t{1} << 20); cpus *= 2) {
    CpuMask mask(cpus);
    if (sched_getaffinity(0, mask.bytes(), mask.get()) == 0) {
      std::vector<int> allowed;
      for (int cpu = 0; cpu < static_cast<int>(cpus); ++cpu) {
        if (mask.contains(cpu)) allowed.push_back(cpu);
      }
      return allowed;
    }
    if (errno != EINVAL) break;
  }
  const int code = errno;
  throw SystemError(code, std::string("sched_getaffinity: ") + std::strerror(code));
}

void run_team(const std::vector<int>& cpus,
              const std::function<void(size_t, Clock::time_point)>& job) {
  check_cpus(cpus);
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

}  // namespace cxl_offload
