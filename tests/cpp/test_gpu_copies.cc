#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "fake_libcuda.h"
#include "probe/gpu_copies.h"

namespace cxl_offload::probe {
namespace {

constexpr char kNowhere[] = "libcuda_that_is_not_there.so.1";

std::string library() {
  const char* path = std::getenv("CXL_OFFLOAD_TEST_LIBCUDA");
  if (path == nullptr) throw std::runtime_error("CXL_OFFLOAD_TEST_LIBCUDA names no library");
  return path;
}

FakeCuda& fresh_cuda() {
  void* handle = dlopen(library().c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  FakeCuda& cuda = *reinterpret_cast<FakeCudaState>(dlsym(handle, "fake_cuda"))();
  cuda = {};
  return cuda;
}

alignas(4096) std::byte memory[8192];
const std::span<std::byte> kRange(memory);

void check_nothing_is_left(const FakeCuda& cuda) {
  CHECK_EQ(cuda.retained, 0);
  CHECK_EQ(cuda.allocations, 0);
  CHECK(cuda.registered.empty());
  CHECK(cuda.current.empty());
}

TEST(gpus_are_listed_with_their_addresses) {
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 2;
  const GpuList found = list_gpus(library());
  CHECK_EQ(found.gpus.size(), 2u);
  CHECK_EQ(found.gpus[1].name, std::string("Fake GPU 1"));
  CHECK_EQ(found.gpus[1].pci_address, std::string("0000:a1:00.0"));
  CHECK_EQ(cuda.retained, 0);
}

TEST(no_gpus_are_listed_with_a_reason) {
  CHECK(list_gpus(kNowhere).reason.find(kNowhere) != std::string::npos);
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 0;
  CHECK_EQ(list_gpus(library()).reason, std::string("the driver finds no GPU"));
  cuda.results["cuInit"] = 100;
  CHECK(list_gpus(library()).reason.find("cuInit") != std::string::npos);
}

TEST(copies_carry_the_bytes_both_ways_and_are_waited_for) {
  FakeCuda& cuda = fresh_cuda();
  GpuCopies copies(library(), 0, kRange);
  std::fill(kRange.begin(), kRange.end(), std::byte{7});
  copies.copy(true, 8192);
  std::fill(kRange.begin(), kRange.end(), std::byte{0});
  cuda.calls.clear();
  copies.copy(false, 64);
  CHECK(std::all_of(memory, memory + 64, [](std::byte b) { return b == std::byte{7}; }));
  CHECK(memory[64] == std::byte{0});
  // What was copied is there only after the wait.
  CHECK(cuda.calls.size() >= 2);
  const auto copied = std::find_if(cuda.calls.begin(), cuda.calls.end(), [](const auto& call) {
    return call.starts_with("cuMemcpyAsync");
  });
  const auto waited = std::find_if(copied, cuda.calls.end(), [](const auto& call) {
    return call.starts_with("cuCtxSynchronize");
  });
  CHECK(waited != cuda.calls.end());
}

TEST(copies_give_everything_back) {
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 2;
  {
    GpuCopies copies(library(), 1, kRange);
    CHECK_EQ(cuda.retained, 1);
    CHECK_EQ(cuda.allocations, 1);
    CHECK_EQ(cuda.registered.size(), 1u);
    CHECK(cuda.current.empty());  // the caller's own context is left as it was
  }
  check_nothing_is_left(cuda);
}

TEST(refusals_halfway_leave_nothing_behind) {
  for (const char* call :
       {"cuCtxPushCurrent", "cuStreamCreate", "cuMemAlloc", "cuMemHostRegister"}) {
    FakeCuda& cuda = fresh_cuda();
    cuda.results[call] = 999;
    const std::string text = CHECK_THROWS(SystemError, GpuCopies(library(), 0, kRange));
    CHECK(text.find(call) != std::string::npos);
    check_nothing_is_left(cuda);
  }
  FakeCuda& cuda = fresh_cuda();
  cuda.results["cuMemAlloc"] = gpu::kCuOutOfMemory;
  CHECK_THROWS(OutOfMemory, GpuCopies(library(), 0, kRange));
  check_nothing_is_left(cuda);
}

TEST(copies_that_cannot_be_are_refused) {
  FakeCuda& cuda = fresh_cuda();
  CHECK_THROWS(InvalidArgument, GpuCopies(library(), 1, kRange));
  CHECK_THROWS(InvalidArgument, GpuCopies(library(), -1, kRange));
  CHECK_THROWS(InvalidArgument, GpuCopies(kNowhere, 0, kRange));
  GpuCopies copies(library(), 0, kRange);
  CHECK_THROWS(InvalidArgument, copies.copy(true, 0));
  CHECK_THROWS(InvalidArgument, copies.copy(true, 8193));
  cuda.results["cuMemcpyAsync"] = 700;
  CHECK_THROWS(SystemError, copies.copy(true, 64));
}

}  // namespace
}  // namespace cxl_offload::probe
