#include "kernels/openmp.h"

#include <dlfcn.h>

#include <atomic>

#include "core/fork_guard.h"

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

std::atomic<Parallel*> parallel{nullptr};
std::atomic<MaxThreads*> max_threads{nullptr};
// Set when this library is loaded. If the process was forked before, OpenMP may still count the
// threads of the parent and wait for them for ever.
const ForkGuard guard;
const bool loaded_in_child = is_forked_process();

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

}  // namespace cxl_offload::kernels
