#include "core/cpus.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>

#include "core/error.h"

namespace cxl_offload {
namespace {

constexpr size_t kWidestMask = size_t{1} << 20;

class CpuMask {
 public:
  explicit CpuMask(size_t cpus)
      : cpus_(cpus), mask_(CPU_ALLOC(cpus), [](cpu_set_t* set) { CPU_FREE(set); }) {
    if (mask_) CPU_ZERO_S(bytes(), mask_.get());
  }
  explicit operator bool() const { return mask_ != nullptr; }
  size_t bytes() const { return CPU_ALLOC_SIZE(cpus_); }
  cpu_set_t* get() const { return mask_.get(); }
  bool contains(int cpu) const { return CPU_ISSET_S(cpu, bytes(), mask_.get()); }
  void insert(int cpu) { CPU_SET_S(cpu, bytes(), mask_.get()); }

 private:
  size_t cpus_;
  std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask_;
};

}  // namespace

std::vector<int> allowed_cpus() {
  // The call fails with EINVAL while the mask is narrower than the kernel's own.
  int code = EINVAL;
  for (size_t cpus = 1024; code == EINVAL && cpus <= kWidestMask; cpus *= 2) {
    CpuMask mask(cpus);
    if (!mask) throw OutOfMemory("a mask of " + std::to_string(cpus) + " CPUs: no memory");
    if (sched_getaffinity(0, mask.bytes(), mask.get()) == 0) {
      std::vector<int> allowed;
      for (int cpu = 0; cpu < static_cast<int>(cpus); ++cpu) {
        if (mask.contains(cpu)) allowed.push_back(cpu);
      }
      return allowed;
    }
    code = errno;
  }
  throw SystemError(code, std::string("sched_getaffinity: ") + std::strerror(code));
}

void check_cpus(const std::string& what, const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  const std::vector<int> allowed = allowed_cpus();
  for (const int cpu : cpus) {
    if (std::ranges::binary_search(allowed, cpu)) continue;
    throw InvalidArgument(what + ": this process may not use CPU " + std::to_string(cpu) +
                          "; it may use " + std::to_string(allowed.size()) + " CPUs, from " +
                          std::to_string(allowed.front()) + " to " +
                          std::to_string(allowed.back()));
  }
}

int bind_thread(const std::vector<int>& cpus) noexcept {
  if (cpus.empty()) return 0;
  CpuMask mask(static_cast<size_t>(*std::ranges::max_element(cpus)) + 1);
  if (!mask) return ENOMEM;
  for (const int cpu : cpus) mask.insert(cpu);
  return sched_setaffinity(0, mask.bytes(), mask.get()) == 0 ? 0 : errno;
}

}  // namespace cxl_offload
