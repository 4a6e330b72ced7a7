#include "kernels/openmp.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <future>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/fork_guard.h"
#include "core/threads.h"

namespace cxl_offload::kernels {
namespace {

// GCC's entry points, which LLVM's and Intel's libraries have as well.
using Parallel = void(void (*)(void*), void*, unsigned, unsigned);
using MaxThreads = int();

template <class Function>
Function* loaded(const char* name, std::atomic<Function*>& known) {
  Function* found = known.load(std::memory_order_relaxed);
  if (found == nullptr) {  // torch may be imported later
    found = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
    known.store(found, std::memory_order_relaxed);
  }
  return found;
}

constexpr size_t kSpareThreads = 32;

std::atomic<Parallel*> parallel{nullptr};
std::atomic<MaxThreads*> max_threads{nullptr};
std::atomic<MaxThreads*> processors{nullptr};
std::atomic<MaxThreads*> team_threads{nullptr};
// Set when this library is loaded. If the process was forked before, OpenMP may still count the
// threads of the parent and wait for them for ever.
const ForkGuard guard;
const bool loaded_in_child = is_forked_process();

// What says how threads wait, and what lets the idle threads take more memory than threads do.
constexpr const char* kSaysOtherwise[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_STACKSIZE",
                                          "GOMP_STACKSIZE"};

// The library that a function is in; null for null.
const void* library_of(void* function) {
  Dl_info found{};
  return function != nullptr && dladdr(function, &found) != 0 ? found.dli_fbase : nullptr;
}

// LLVM's and Intel's libraries have GNU's entry points, but not its way to wait.
bool is_gnu() {
  const void* const gnu = library_of(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return gnu != nullptr && gnu != library_of(dlsym(RTLD_DEFAULT, "__kmpc_fork_call"));
}

// Zero where OpenMP is not there.
size_t cpus_of_openmp() {
  MaxThreads* const count = loaded("omp_get_num_procs", processors);
  return count == nullptr ? 0 : static_cast<size_t>(std::max(count(), 0));
}

// GNU's OpenMP ends the process where it cannot make a thread. So as many are made before, all at
// once, and kSpareThreads more, which other threads of the process may make in the meantime. Throws
// SystemError where that fails.
void check_that_threads_can_be_made(size_t count) {
  std::promise<void> all_made;
  const std::shared_future<void> end(all_made.get_future());
  std::vector<std::jthread> threads;
  try {
    while (threads.size() < count + kSpareThreads) {
      threads.push_back(start_thread("let OpenMP's threads sleep", [end] { end.wait(); }));
    }
  } catch (...) {
    all_made.set_value();
    throw;
  }
  all_made.set_value();
}

}  // namespace

bool run_on_openmp(size_t threads, const std::function<void()>& job) {
  if (loaded_in_child || guard.in_child()) return false;
  Parallel* run = loaded("GOMP_parallel", parallel);
  MaxThreads* count = loaded("omp_get_max_threads", max_threads);
  if (run == nullptr || count == nullptr) return false;
  if (count() < 0 || static_cast<size_t>(count()) != threads) return false;
  run([](void* given) { (*static_cast<const std::function<void()>*>(given))(); },
      const_cast<std::function<void()>*>(&job), static_cast<unsigned>(threads), 0);
  return true;
}

std::string why_openmp_cannot_sleep() {
  if (loaded_in_child || guard.in_child())
    return "this process was forked and ran no program since";
  for (const char* name : kSaysOtherwise) {
    if (std::getenv(name) != nullptr) return std::string(name) + " is set";
  }
  if (!is_gnu()) return "no OpenMP is loaded, or it is not GNU's";
  return cpus_of_openmp() < 2 ? "there is one CPU" : "";
}

// OpenMP's threads belong to the thread that uses them, and end with it.
class SleepingWaits::Team {
 public:
  explicit Team(unsigned count)
      : owner_(start_thread("let OpenMP's threads sleep", [this, count] { hold(count); })) {
    made_.wait();
  }

  ~Team() { end_.count_down(); }

  // Whether OpenMP made as many as were asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC).
  bool is_whole() const { return whole_; }

 private:
  void hold(unsigned count) {
    size_t found = 0;
    loaded("GOMP_parallel", parallel)(&count_team, &found, count, 0);
    whole_ = found == count;
    made_.count_down();
    end_.wait();
  }

  // All of the team write the same, so that the order does not matter.
  static void count_team(void* found) {
    MaxThreads* const count = loaded("omp_get_num_threads", team_threads);
    if (count == nullptr) return;
    std::atomic_ref(*static_cast<size_t*>(found)).store(static_cast<size_t>(count()));
  }

  bool whole_ = false;
  std::latch made_{1};
  std::latch end_{1};
  std::jthread owner_;  // last: it uses the others
};

SleepingWaits::SleepingWaits() {
  if (!why_openmp_cannot_sleep().empty()) return;
  // Its owner is a thread of the team: with any thread that uses OpenMP, they are more than the
  // CPUs.
  const size_t idle = cpus_of_openmp();
  check_that_threads_can_be_made(idle + 1);
  team_ = std::make_unique<Team>(static_cast<unsigned>(idle + 1));
  if (!team_->is_whole()) {
    team_.reset();
    throw SystemError(EAGAIN,
                      "let OpenMP's threads sleep: it makes fewer threads than CPUs and "
                      "one (OMP_THREAD_LIMIT, OMP_DYNAMIC)");
  }
}

SleepingWaits::~SleepingWaits() = default;

}  // namespace cxl_offload::kernels
