// The seam to the GPU driver: pinning, events, streams and copies, in the caller's own context. It
// has two implementations: cuda_driver (libcuda, opened at run time) and fake_driver (for tests
// without a GPU).
#ifndef CXL_OFFLOAD_GPU_DRIVER_H_
#define CXL_OFFLOAD_GPU_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/fork_guard.h"

namespace cxl_offload::gpu {

// A stream as an integer (cudaStream_t / CUstream); 0 is the default stream.
using StreamId = uint64_t;
// An event as an integer; 0 is none.
using EventId = uint64_t;

// No driver works in a forked child. There, every function that may throw throws InvalidArgument at
// once.
class GpuDriver {
 public:
  virtual ~GpuDriver() = default;

  virtual std::string name() const = 0;
  // Pins whole pages for DMA in the calling thread's current context, portably for all contexts.
  // Never creates a context: throws InvalidArgument when there is none.
  virtual void register_host(std::span<std::byte> range) = 0;
  // Safe at interpreter exit, when the driver may be gone already, and from any thread.
  virtual void unregister_host(std::byte* address) noexcept = 0;

  // Returns an event behind all work that is queued on `stream` now.
  virtual EventId record_event(StreamId stream) = 0;
  // True once the work before the event is done; also when the driver is shutting down.
  virtual bool event_done(EventId event) noexcept = 0;
  virtual void wait_event(EventId event) = 0;
  virtual void destroy_event(EventId event) noexcept = 0;
  // Waits for all work on all streams of the context in which memory was registered.
  virtual void synchronize() = 0;

  // Makes a stream that does not wait for the default stream, in the calling thread's current
  // context.
  virtual StreamId create_stream() = 0;
  // Work queued on it still runs.
  virtual void destroy_stream(StreamId stream) noexcept = 0;
  // Makes everything that is queued on `stream` from now on wait for the work before the event.
  virtual void stream_wait(StreamId stream, EventId event) = 0;
  // Queues a copy between any two of device memory and host memory. Host memory that is not
  // pinned may be copied before this returns, at the driver's choice. Any thread may call it, with
  // any stream but the default ones.
  virtual void copy(uint64_t target, uint64_t source, size_t bytes, StreamId stream) = 0;
  // Queues copies that may run side by side: targets must not overlap each other or any source. The
  // driver does it in one call if it can (`batched` says whether), otherwise in a call for each
  // copy.
  virtual void copy_batch(std::span<const uint64_t> targets, std::span<const uint64_t> sources,
                          std::span<const size_t> sizes, StreamId stream) = 0;
  virtual bool batched() const = 0;

 protected:
  void refuse_in_child() const { guard_.refuse_in_child("use a GPU driver"); }
  bool in_child() const { return guard_.in_child(); }

 private:
  const ForkGuard guard_;
};

}  // namespace cxl_offload::gpu

#endif  // CXL_OFFLOAD_GPU_DRIVER_H_
