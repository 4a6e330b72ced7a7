// CPUs beyond the 1024 of a fixed mask. This program answers for a kernel that has 2048 of them.
#include <sched.h>

#include <atomic>
#include <cerrno>
#include <vector>

#include "check.h"
#include "core/cpus.h"
#include "core/error.h"
#include "transfer/copy_team.h"

namespace {

constexpr size_t kMaskBytes = 2048 / 8;
constexpr int kFarCpu = 1500;

std::atomic<int> bound_far = 0;

}  // namespace

extern "C" int sched_getaffinity(pid_t, size_t bytes, cpu_set_t* mask) noexcept {
  if (bytes < kMaskBytes) {
    errno = EINVAL;
    return -1;
  }
  CPU_ZERO_S(bytes, mask);
  CPU_SET_S(0, bytes, mask);
  CPU_SET_S(kFarCpu, bytes, mask);
  return 0;
}

extern "C" int sched_setaffinity(pid_t, size_t bytes, const cpu_set_t* mask) noexcept {
  if (CPU_ISSET_S(kFarCpu, bytes, mask)) ++bound_far;
  return 0;
}

namespace cxl_offload {
namespace {

TEST(cpus_beyond_a_fixed_mask_are_known) {
  CHECK(allowed_cpus() == std::vector<int>({0, kFarCpu}));
  check_cpus("work", {kFarCpu, 0});
  for (const int cpu : {1, 1499, 1 << 20, -1}) {
    CHECK_THROWS(InvalidArgument, check_cpus("work", {cpu}));
  }
}

TEST(helper_on_a_far_cpu_is_bound_to_it) {
  transfer::CopyTeam team({kFarCpu, 0});
  std::atomic<int> done = 0;
  team.share_out(100, 3, [&](size_t) { ++done; });
  CHECK_EQ(done.load(), 100);
  CHECK_EQ(bound_far.load(), 1);
}

}  // namespace
}  // namespace cxl_offload
