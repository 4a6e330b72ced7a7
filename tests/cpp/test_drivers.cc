#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "fake_libcuda.h"
#include "gpu/cuda_driver.h"
#include "gpu/fake_driver.h"

namespace cxl_offload::gpu {
namespace {

std::string library() {
  const char* path = std::getenv("CXL_OFFLOAD_TEST_LIBCUDA");
  if (path == nullptr) throw std::runtime_error("CXL_OFFLOAD_TEST_LIBCUDA names no library");
  return path;
}

// The library's state, fresh.
FakeCuda& fresh_cuda() {
  void* handle = dlopen(library().c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  FakeCuda& cuda = *reinterpret_cast<FakeCudaState>(dlsym(handle, "fake_cuda"))();
  cuda = {};
  return cuda;
}

std::shared_ptr<CudaDriver> open_driver() {
  auto opened = CudaDriver::open(library());
  if (!opened.driver) throw std::runtime_error(opened.reason);
  return opened.driver;
}

bool called(const FakeCuda& cuda, const std::string& call) {
  return std::find(cuda.calls.begin(), cuda.calls.end(), call) != cuda.calls.end();
}

alignas(4096) std::byte memory[8192];
const std::span<std::byte> kRange(memory, 4096);

TEST(open_without_a_library_says_why) {
  const auto opened = CudaDriver::open("libcuda_that_is_not_there.so.1");
  CHECK(opened.driver == nullptr);
  CHECK(opened.reason.find("libcuda_that_is_not_there") != std::string::npos);
}

TEST(open_with_a_library_that_is_not_cuda_says_what_is_missing) {
  const auto opened = CudaDriver::open("libm.so.6");
  CHECK(opened.driver == nullptr);
  CHECK(opened.reason.find("cuInit") != std::string::npos);
}

TEST(open_without_a_gpu_says_why) {
  FakeCuda& cuda = fresh_cuda();
  cuda.results["cuInit"] = 100;
  auto opened = CudaDriver::open(library());
  CHECK(opened.driver == nullptr);
  CHECK_EQ(opened.reason, "cuInit: a fake error (CUDA_ERROR_FAKE, 100)");
  cuda.results.clear();
  cuda.gpus = 0;
  opened = CudaDriver::open(library());
  CHECK(opened.driver == nullptr);
  CHECK(!opened.reason.empty());
}

TEST(register_without_a_context_is_refused_and_creates_none) {
  FakeCuda& cuda = fresh_cuda();
  const auto driver = open_driver();
  const auto message = CHECK_THROWS(InvalidArgument, driver->register_host(kRange));
  CHECK(message.find("run any CUDA operation first") != std::string::npos);
  CHECK(!called(cuda, "CREATED A CONTEXT"));
  CHECK(cuda.registered.empty());
}

TEST(register_uses_the_current_context_and_is_portable) {
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 2;
  cuda.active = {0x1000, 0x2000};
  cuda.current = {0x2000};
  const auto driver = open_driver();
  driver->register_host(kRange);
  CHECK(called(cuda, "cuMemHostRegister 2000 1"));
  CHECK_EQ(cuda.registered.count(memory), 1u);
  cuda.current.clear();  // another thread drops it
  driver->unregister_host(memory);
  CHECK(called(cuda, "cuMemHostUnregister 2000"));
  CHECK(cuda.registered.empty());
  CHECK(cuda.current.empty());
  CHECK_EQ(cuda.retained, 0);
}

TEST(register_in_a_thread_without_context_uses_a_primary_one_in_use) {
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 2;
  cuda.active = {0x2000};
  const auto driver = open_driver();
  driver->register_host(kRange);
  CHECK(called(cuda, "cuMemHostRegister 2000 1"));
  CHECK(!called(cuda, "CREATED A CONTEXT"));
  CHECK_EQ(cuda.retained, 0);
  CHECK(cuda.current.empty());
  driver->unregister_host(memory);
}

TEST(register_refused_leaves_nothing_and_names_the_call) {
  FakeCuda& cuda = fresh_cuda();
  cuda.current = {0x1000};
  const auto driver = open_driver();
  cuda.results["cuMemHostRegister"] = 2;
  CHECK_THROWS(OutOfMemory, driver->register_host(kRange));
  cuda.results["cuMemHostRegister"] = 801;
  const auto message = CHECK_THROWS(SystemError, driver->register_host(kRange));
  CHECK_EQ(message, "pin 4 KiB: cuMemHostRegister: a fake error (CUDA_ERROR_FAKE, 801)");
  cuda.results.clear();
  cuda.calls.clear();
  driver->unregister_host(memory);
  CHECK(!called(cuda, "cuMemHostUnregister 1000"));
  CHECK_EQ(cuda.current.size(), 1u);
}

TEST(register_twice_keeps_the_first) {
  FakeCuda& cuda = fresh_cuda();
  cuda.current = {0x1000};
  const auto driver = open_driver();
  driver->register_host(kRange);
  try {
    driver->register_host(kRange);
    CHECK(!"registered twice");
  } catch (const SystemError& error) {
    CHECK_EQ(error.code(), EEXIST);
  }
  driver->unregister_host(memory);
  CHECK(cuda.registered.empty());
}

TEST(unregister_after_the_context_or_the_driver_is_gone_is_quiet) {
  FakeCuda& cuda = fresh_cuda();
  cuda.current = {0x1000};
  const auto driver = open_driver();
  driver->register_host(kRange);
  cuda.destroyed = {0x1000};
  cuda.current.clear();
  driver->unregister_host(memory);
  CHECK(!called(cuda, "cuMemHostUnregister 0"));
  cuda = {};
  cuda.current = {0x1000};
  driver->register_host(kRange);
  cuda.results["cuCtxPushCurrent"] = 4;
  driver->unregister_host(memory);
  driver->unregister_host(memory);
}

TEST(event_is_recorded_in_the_context_of_its_stream) {
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 2;
  cuda.active = {0x1000, 0x2000};
  cuda.current = {0x1000};
  const auto driver = open_driver();
  const EventId event = driver->record_event(0x2010);
  CHECK(called(cuda, "cuEventCreate 2000 2"));
  CHECK(called(cuda, "cuEventRecord 2000 2010"));
  cuda.busy = {0x2000};
  CHECK(!driver->event_done(event));
  driver->wait_event(event);
  CHECK(driver->event_done(event));
  driver->destroy_event(event);
  CHECK_EQ(cuda.live_events, 0);
  CHECK_EQ(cuda.current.size(), 1u);
}

TEST(event_of_the_default_stream_covers_every_context_in_use) {
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 3;
  cuda.active = {0x1000, 0x3000};
  const auto driver = open_driver();
  const EventId event = driver->record_event(0);
  CHECK(called(cuda, "cuEventRecord 1000 0"));
  CHECK(called(cuda, "cuEventRecord 3000 0"));
  cuda.busy = {0x3000};
  CHECK(!driver->event_done(event));
  cuda.busy.clear();
  CHECK(driver->event_done(event));
  driver->destroy_event(event);
  CHECK_EQ(cuda.live_events, 0);
  CHECK_EQ(cuda.retained, 0);
  CHECK(!called(cuda, "CREATED A CONTEXT"));
}

TEST(event_on_a_stream_that_cannot_be_followed_is_refused) {
  FakeCuda& cuda = fresh_cuda();
  cuda.active = {0x1000};
  const auto driver = open_driver();
  CHECK_THROWS(InvalidArgument, driver->record_event(2));
  cuda.capturing = {0x1010};
  CHECK_THROWS(SystemError, driver->record_event(0x1010));
  cuda.results["cuStreamGetCtx"] = 400;
  CHECK_THROWS(SystemError, driver->record_event(0x1020));
  cuda.results = {{"cuEventRecord", 400}};
  CHECK_THROWS(SystemError, driver->record_event(0x1020));
  CHECK_EQ(cuda.live_events, 0);
  CHECK(cuda.current.empty());
}

TEST(event_is_done_when_the_driver_shuts_down_but_not_after_a_fault) {
  FakeCuda& cuda = fresh_cuda();
  cuda.active = {0x1000};
  const auto driver = open_driver();
  const EventId event = driver->record_event(0x1010);
  cuda.results = {{"cuEventQuery", 4}, {"cuEventSynchronize", 4}};
  CHECK(driver->event_done(event));
  driver->wait_event(event);
  cuda.results = {{"cuEventQuery", 700}, {"cuEventSynchronize", 700}};
  CHECK(!driver->event_done(event));
  const auto message = CHECK_THROWS(SystemError, driver->wait_event(event));
  CHECK(message.find("cuEventSynchronize") != std::string::npos);
  driver->destroy_event(event);
}

TEST(synchronize_covers_contexts_that_registered_and_primary_ones) {
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 2;
  cuda.active = {0x2000};
  cuda.current = {0x5000};
  const auto driver = open_driver();
  driver->register_host(kRange);
  cuda.busy = {0x2000, 0x5000};
  driver->synchronize();
  CHECK(cuda.busy.empty());
  cuda.results["cuCtxSynchronize"] = 4;
  driver->synchronize();
  cuda.results["cuCtxSynchronize"] = 719;
  CHECK_THROWS(SystemError, driver->synchronize());
  cuda.results.clear();
  cuda.destroyed = {0x5000};
  driver->synchronize();
  driver->unregister_host(memory);
  CHECK_EQ(cuda.retained, 0);
}

TEST(stream_is_made_in_the_current_context_or_one_in_use) {
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 2;
  const auto driver = open_driver();
  CHECK_THROWS(InvalidArgument, driver->create_stream());
  cuda.active = {0x2000};
  const StreamId stream = driver->create_stream();
  CHECK_EQ(stream, 0x2010u);
  CHECK(called(cuda, "cuStreamCreate 2000 1"));
  cuda.current = {0x1000};
  driver->destroy_stream(stream);
  CHECK(called(cuda, "cuStreamDestroy 2010"));
  CHECK_EQ(cuda.current.size(), 1u);
  CHECK_EQ(cuda.retained, 0);
  cuda.destroyed = {0x2000};
  driver->destroy_stream(stream);
  CHECK(!called(cuda, "CREATED A CONTEXT"));
}

TEST(copies_go_to_the_context_of_their_stream) {
  FakeCuda& cuda = fresh_cuda();
  cuda.active = {0x1000};
  const auto driver = open_driver();
  const std::vector<int> from{1, 2, 3, 4};
  std::vector<int> to(4);
  const auto at = [](const int& value) { return reinterpret_cast<uint64_t>(&value); };
  driver->copy(at(to[0]), at(from[0]), 2 * sizeof(int), 0x1010);
  CHECK(called(cuda, "cuMemcpyAsync 1000 1010 8"));
  const std::vector<uint64_t> targets{at(to[2]), at(to[3])}, sources{at(from[2]), at(from[3])};
  const std::vector<size_t> sizes{sizeof(int), sizeof(int)};
  driver->copy_batch(targets, sources, sizes, 0x1010);
  CHECK(called(cuda, "cuMemcpyBatchAsync 1000 1010 2"));
  CHECK(to == from);
  CHECK(cuda.current.empty());
  CHECK_THROWS(InvalidArgument, driver->copy(at(to[0]), at(from[0]), 4, 0));
  CHECK_THROWS(InvalidArgument, driver->copy_batch(targets, sources, {}, 0x1010));
  cuda.results["cuMemcpyAsync"] = 719;
  const auto message = CHECK_THROWS(SystemError, driver->copy(at(to[0]), at(from[0]), 4, 0x1010));
  CHECK(message.find("cuMemcpyAsync") != std::string::npos);
  CHECK(cuda.current.empty());
}

TEST(stream_waits_for_every_event_of_a_default_stream) {
  FakeCuda& cuda = fresh_cuda();
  cuda.gpus = 2;
  cuda.active = {0x1000, 0x2000};
  const auto driver = open_driver();
  const EventId event = driver->record_event(0);
  driver->stream_wait(0x2010, event);
  CHECK_EQ(std::count(cuda.calls.begin(), cuda.calls.end(), "cuStreamWaitEvent 2000 2010"), 2);
  driver->destroy_event(event);
}

TEST(fake_copy_is_done_in_its_turn_and_after_what_its_stream_waits_for) {
  FakeDriver driver;
  const StreamId first = driver.create_stream(), second = driver.create_stream();
  int source = 1, target = 0;
  const auto at = [](int& value) { return reinterpret_cast<uint64_t>(&value); };
  driver.launch(first);
  const EventId event = driver.record_event(first);
  driver.stream_wait(second, event);
  driver.copy(at(target), at(source), sizeof(int), second);
  source = 2;
  CHECK_EQ(driver.step(second, 9), 0u);
  CHECK_EQ(driver.step(first, 9), 1u);
  CHECK_EQ(target, 0);
  CHECK_EQ(driver.step(second, 9), 2u);
  CHECK_EQ(target, 2);
  driver.launch(first);
  const EventId late = driver.record_event(first);
  driver.stream_wait(second, late);
  source = 3;
  driver.copy(at(target), at(source), sizeof(int), second);
  driver.finish(second);
  CHECK_EQ(target, 3);
  CHECK(driver.event_done(late));
  driver.fail_copy(1);
  CHECK_THROWS(SystemError, driver.copy(at(target), at(source), sizeof(int), second));
  CHECK_EQ(driver.counts().copied_bytes, 2 * sizeof(int));
  for (const EventId each : {event, late}) driver.destroy_event(each);
}

TEST(fake_driver_counts_and_limits_registrations) {
  FakeDriver driver(6000);
  driver.register_host(kRange);
  CHECK(driver.is_registered(memory + 4095));
  CHECK(!driver.is_registered(memory + 4096));
  CHECK_THROWS(SystemError, driver.register_host({memory + 4000, 10}));
  CHECK_THROWS(OutOfMemory, driver.register_host({memory + 4096, 4096}));
  driver.unregister_host(memory);
  driver.unregister_host(memory);
  driver.fail_registration(2);
  driver.register_host(kRange);
  CHECK_THROWS(SystemError, driver.register_host({memory + 4096, 100}));
  driver.register_host({memory + 4096, 100});
  CHECK_EQ(driver.counts().registrations, 3u);
  CHECK_EQ(driver.counts().registered_bytes, 4196u);
  CHECK_EQ(driver.counts().wrong_unregisters, 1u);
}

TEST(fake_event_is_done_when_the_work_before_it_is) {
  FakeDriver driver;
  const EventId idle = driver.record_event(7);
  CHECK(driver.event_done(idle));
  driver.launch(7);
  const EventId event = driver.record_event(7);
  driver.launch(7);
  CHECK(!driver.event_done(event));
  driver.wait_event(event);
  CHECK(driver.event_done(event));
  const EventId later = driver.record_event(7);
  CHECK(!driver.event_done(later));
  driver.finish(7);
  CHECK(driver.event_done(later));
  for (const EventId each : {idle, event, later}) driver.destroy_event(each);
  CHECK_EQ(driver.counts().events, 0u);
}

}  // namespace
}  // namespace cxl_offload::gpu
