// A GPU driver without a GPU: streams whose work is done when the test says so, or when it is
// waited for. Device memory is any memory of this process. A copy is done when its turn comes, not
// when it is queued, so that bytes changed in between are seen.
#ifndef CXL_OFFLOAD_GPU_FAKE_DRIVER_H_
#define CXL_OFFLOAD_GPU_FAKE_DRIVER_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

#include "gpu/driver.h"

namespace cxl_offload::gpu {

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
  StreamId create_stream() override;
  void destroy_stream(StreamId stream) noexcept override;
  void stream_wait(StreamId stream, EventId event) override;
  void copy(uint64_t target, uint64_t source, size_t bytes, StreamId stream) override;
  void copy_batch(std::span<const uint64_t> targets, std::span<const uint64_t> sources,
                  std::span<const size_t> sizes, StreamId stream) override;
  bool batched() const override { return true; }

  // What happens to the pages when memory is registered and when that ends. Called while the driver
  // is locked. When `pin` throws, the registration did not happen.
  struct Pinning {
    std::function<void(std::span<std::byte> range)> pin;
    std::function<void(std::byte* address)> unpin;  // must not throw
  };
  void set_pinning(Pinning pinning);

  // Queues one piece of work.
  void launch(StreamId stream);
  // Does all work that is queued on the stream so far, and the work on other streams that it waits
  // for.
  void finish(StreamId stream);
  // Runs up to `count` pieces of work of the stream, as far as it need not wait for another stream;
  // returns how many.
  size_t step(StreamId stream, size_t count = 1);
  // Whether waiting for an event lasts until the test has finished the work, as on a GPU. At first
  // it does not: the thread that waits does the work.
  void hold_waiters(bool hold);
  // The n-th registration from now (1 is the next) is refused with SystemError; 0 is none.
  void fail_registration(uint64_t nth);
  // The n-th copy from now (1 is the next) is refused with SystemError; 0 is none.
  void fail_copy(uint64_t nth);
  // From now on recording events, copying and synchronizing are refused, as after a fault of the
  // GPU.
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
    uint64_t streams = 0;       // made and not destroyed
    uint64_t copies = 0;        // queued
    uint64_t copied_bytes = 0;  // done
    uint64_t waiters = 0;       // threads that wait for an event now
  };
  Counts counts() const;
  // How many pieces of work are queued and not done.
  size_t pending(StreamId stream) const;
  bool is_registered(const std::byte* address) const;

 private:
  struct Event {
    StreamId stream;
    uint64_t behind;  // done once the stream's `done` reaches it
  };
  // A copy, a wait for another stream, or something that takes time only.
  struct Work {
    uint64_t target = 0;
    uint64_t source = 0;
    size_t bytes = 0;
    Event wait{0, 0};
  };
  struct Stream {
    std::deque<Work> work;
    uint64_t queued = 0;
    uint64_t done = 0;
  };

  std::unique_lock<std::mutex> locked() const;
  // Callers of all of these hold the lock.
  void queue(StreamId stream, const Work& work);
  bool is_done(const Event& event) const;
  void run_next(Stream& stream);
  void run_until(const Event& event);

  const uint64_t limit_bytes_;
  mutable std::mutex mutex_;
  std::condition_variable ran_;
  std::map<std::byte*, size_t> ranges_;
  std::map<StreamId, Stream> streams_;
  std::map<EventId, Event> events_;
  EventId last_event_ = 0;
  StreamId last_stream_ = 0x10000;
  uint64_t fail_in_ = 0;
  uint64_t fail_copy_in_ = 0;
  bool hold_ = false;
  bool broken_ = false;
  Pinning pinning_;
  Counts counts_;
};

}  // namespace cxl_offload::gpu

#endif  // CXL_OFFLOAD_GPU_FAKE_DRIVER_H_
