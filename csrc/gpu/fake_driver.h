// A GPU driver without a GPU: streams whose work is done when the test says so, or when it is
// waited for.
#ifndef CXL_OFFLOAD_GPU_FAKE_DRIVER_H_
#define CXL_OFFLOAD_GPU_FAKE_DRIVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include "gpu/driver.h"

namespace cxl_offload {

// Thread-safe.
class FakeDriver final : public GpuDriver {
 public:
  // More registered bytes than this are refused with OutOfMemory.
  explicit FakeDriver(uint64_t limit_bytes = UINT64_MAX) : limit_bytes_(limit_bytes) {}

  std::string name() const override { return "fake"; }
  void register_host(std::span<std::byte> range) override;
  void unregister_host(std::byte* address) noexcept override;
  EventId record_event(StreamId stream) override;
  bool event_done(EventId event) noexcept override;
  void wait_event(EventId event) override;
  void destroy_event(EventId event) noexcept override;
  void synchronize() override;

  // What a registration does to the pages, and its end: called while the driver is locked. A
  // registration that `pin` throws out of did not happen.
  struct Pinning {
    std::function<void(std::span<std::byte> range)> pin;
    std::function<void(std::byte* address)> unpin;  // must not throw
  };
  void set_pinning(Pinning pinning);

  // Queues one piece of work.
  void launch(StreamId stream);
  // Everything queued on the stream so far is done.
  void finish(StreamId stream);
  // The n-th registration from now (1 is the next) is refused with SystemError; 0 is none.
  void fail_registration(uint64_t nth);
  // Recording events and synchronizing are refused, as after a fault of the GPU.
  void break_context();

  struct Counts {
    uint64_t registrations = 0;
    uint64_t registered_bytes = 0;   // now
    uint64_t registered_ranges = 0;  // now
    uint64_t wrong_unregisters = 0;  // of addresses that were not registered
    uint64_t events = 0;             // now
    uint64_t event_queries = 0;
    uint64_t event_waits = 0;
    uint64_t synchronizations = 0;
  };
  Counts counts() const;
  bool is_registered(const std::byte* address) const;

 private:
  struct Stream {
    uint64_t queued = 0;
    uint64_t done = 0;
  };
  struct Event {
    StreamId stream;
    uint64_t behind;  // done once the stream's `done` reaches it
  };

  const uint64_t limit_bytes_;
  mutable std::mutex mutex_;
  std::map<std::byte*, size_t> ranges_;
  std::map<StreamId, Stream> streams_;
  std::map<EventId, Event> events_;
  EventId last_event_ = 0;
  uint64_t fail_in_ = 0;
  bool broken_ = false;
  Pinning pinning_;
  Counts counts_;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_GPU_FAKE_DRIVER_H_
