// The seam to the GPU driver: pinning and events, in the caller's own context. Two
// implementations: cuda_driver (libcuda opened at run time) and fake_driver (tests without a GPU).
#ifndef CXL_OFFLOAD_GPU_DRIVER_H_
#define CXL_OFFLOAD_GPU_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace cxl_offload {

// A stream as an integer (cudaStream_t / CUstream); 0 is the default stream.
using StreamId = uint64_t;
// An event as an integer; 0 is none.
using EventId = uint64_t;

class GpuDriver {
 public:
  virtual ~GpuDriver() = default;

  virtual std::string name() const = 0;
  // Pins whole pages for DMA in the calling thread's current context, portably for all contexts.
  // Never creates a context: throws InvalidArgument when there is none.
  virtual void register_host(std::span<std::byte> range) = 0;
  // Safe at interpreter exit, when the driver may be gone already, and from any thread.
  virtual void unregister_host(std::byte* address) noexcept = 0;

  // An event behind all work that is queued on `stream` now.
  virtual EventId record_event(StreamId stream) = 0;
  // True once the work before the event is done; also when the driver is shutting down.
  virtual bool event_done(EventId event) noexcept = 0;
  virtual void wait_event(EventId event) = 0;
  virtual void destroy_event(EventId event) noexcept = 0;
  // Waits for all work on all streams of the context in which memory was registered.
  virtual void synchronize() = 0;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_GPU_DRIVER_H_
