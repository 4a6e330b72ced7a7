// The fake driver, of which any call that can fail does so when the test says.
#ifndef CXL_OFFLOAD_TESTS_FAILING_DRIVER_H_
#define CXL_OFFLOAD_TESTS_FAILING_DRIVER_H_

#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>

#include "core/error.h"
#include "gpu/fake_driver.h"

namespace cxl_offload::gpu {

enum class Call { kCopy, kRecordEvent, kStreamWait, kCreateStream };

class FailingDriver final : public GpuDriver {
 public:
  FakeDriver& fake() { return fake_; }
  // The n-th such call from now (1 is the next) is refused, as by a driver without memory for it,
  // and no other is; 0: none.
  void fail(Call call, size_t nth) {
    const std::lock_guard lock(mutex_);
    fail_in_.fill(0);
    fail_in_[static_cast<size_t>(call)] = nth;
  }
  size_t failures() const { return failures_; }

  std::string name() const override { return fake_.name(); }
  void register_host(std::span<std::byte> range) override { fake_.register_host(range); }
  void unregister_host(std::byte* address) noexcept override { fake_.unregister_host(address); }
  EventId record_event(StreamId stream) override {
    may_fail(Call::kRecordEvent);
    return fake_.record_event(stream);
  }
  bool event_done(EventId event) noexcept override { return fake_.event_done(event); }
  void wait_event(EventId event) override { fake_.wait_event(event); }
  void destroy_event(EventId event) noexcept override { fake_.destroy_event(event); }
  void synchronize() override { fake_.synchronize(); }
  StreamId create_stream() override {
    may_fail(Call::kCreateStream);
    return fake_.create_stream();
  }
  void destroy_stream(StreamId stream) noexcept override { fake_.destroy_stream(stream); }
  void stream_wait(StreamId stream, EventId event) override {
    may_fail(Call::kStreamWait);
    fake_.stream_wait(stream, event);
  }
  void copy(uint64_t target, uint64_t source, size_t bytes, StreamId stream) override {
    may_fail(Call::kCopy);
    fake_.copy(target, source, bytes, stream);
  }
  void copy_batch(std::span<const uint64_t> targets, std::span<const uint64_t> sources,
                  std::span<const size_t> sizes, StreamId stream) override {
    may_fail(Call::kCopy);
    fake_.copy_batch(targets, sources, sizes, stream);
  }
  bool batched() const override { return fake_.batched(); }

 private:
  void may_fail(Call call) {
    const std::lock_guard lock(mutex_);
    size_t& left = fail_in_[static_cast<size_t>(call)];
    if (left == 0 || --left > 0) return;
    ++failures_;
    throw SystemError(ENOMEM, "refused, as the test asked");
  }

  FakeDriver fake_;
  std::mutex mutex_;
  std::array<size_t, 4> fail_in_{};
  std::atomic<size_t> failures_ = 0;
};

}  // namespace cxl_offload::gpu

#endif  // CXL_OFFLOAD_TESTS_FAILING_DRIVER_H_
