// The CUDA driver, opened at run time: no CUDA header or library is needed to build, and nothing
// is loaded before open() is called.
#ifndef CXL_OFFLOAD_GPU_CUDA_DRIVER_H_
#define CXL_OFFLOAD_GPU_CUDA_DRIVER_H_

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "gpu/driver.h"

namespace cxl_offload::gpu {

struct CudaApi;

// Thread-safe. It calls in contexts that exist and creates none.
class CudaDriver final : public GpuDriver {
 public:
  // `driver` is null if there is none to use, and `reason` says why.
  struct Opened {
    std::shared_ptr<CudaDriver> driver;
    std::string reason;
  };
  // Loads the library and initialises it (cuInit), which creates no context. A process that calls
  // this can no longer use CUDA in children that it forks.
  static Opened open(const std::string& library = "libcuda.so.1");

  explicit CudaDriver(std::shared_ptr<const CudaApi> api);
  ~CudaDriver() override;

  std::string name() const override { return "cuda"; }
  // Pins in the calling thread's context or, in a thread without one, in a primary context in use.
  // The memory is portable, so it is pinned for all contexts. Throws OutOfMemory when the driver
  // has no room, SystemError for any other refusal.
  void register_host(std::span<std::byte> range) override;
  void unregister_host(std::byte* address) noexcept override;
  // The default stream (0) stands for the default streams of all contexts in use. Throws
  // InvalidArgument for the per-thread default stream (2), which means another stream in each
  // thread, and SystemError for a stream that is being captured.
  EventId record_event(StreamId stream) override;
  bool event_done(EventId event) noexcept override;
  void wait_event(EventId event) override;
  void destroy_event(EventId event) noexcept override;
  // Waits in every context that registered memory and in the primary contexts in use: portable
  // memory may be read from any of them.
  void synchronize() override;

  StreamId create_stream() override;
  void destroy_stream(StreamId stream) noexcept override;
  void stream_wait(StreamId stream, EventId event) override;
  void copy(uint64_t target, uint64_t source, size_t bytes, StreamId stream) override;
  void copy_batch(std::span<const uint64_t> targets, std::span<const uint64_t> sources,
                  std::span<const size_t> sizes, StreamId stream) override;
  bool batched() const override;

 private:
  class Contexts;
  struct Mark;

  // Returns the calling thread's context. A thread without one gets a primary context in use, or
  // null if there is none.
  void* context_in_use(const Contexts& contexts) const;

  const std::shared_ptr<const CudaApi> api_;
  std::mutex mutex_;
  std::map<std::byte*, void*> registered_;  // address -> the context it was registered in
};

}  // namespace cxl_offload::gpu

#endif  // CXL_OFFLOAD_GPU_CUDA_DRIVER_H_
