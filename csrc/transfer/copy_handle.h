// One transfer as its owner sees it.
#ifndef CXL_OFFLOAD_TRANSFER_COPY_HANDLE_H_
#define CXL_OFFLOAD_TRANSFER_COPY_HANDLE_H_

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "core/fork_guard.h"
#include "gpu/driver.h"

namespace cxl_offload::transfer {

// Thread-safe; outlives its engine. Dropping it does not stop the transfer. In a forked child it
// can only be dropped: all else throws InvalidArgument.
class CopyHandle {
 public:
  CopyHandle(std::shared_ptr<gpu::GpuDriver> driver, size_t bytes)
      : driver_(std::move(driver)), bytes_(bytes) {}
  ~CopyHandle();
  CopyHandle(const CopyHandle&) = delete;
  CopyHandle& operator=(const CopyHandle&) = delete;

  size_t bytes() const { return bytes_; }
  // Whether all bytes have arrived. Throws what made the transfer fail.
  bool query();
  // Returns when all bytes have arrived. Throws what made the transfer fail.
  void wait();
  // What is queued on `stream` from now on runs after the transfer; waits until the transfer has
  // been handed to the GPU. Throws what made it fail.
  void stream_wait(gpu::StreamId stream);

  // For the engine. `events` are behind the last copies of all streams used, and are owned from now
  // on.
  void issued(std::vector<gpu::EventId> events);
  // Nothing of it is running any more.
  void failed(std::exception_ptr reason);
  // As query, but a failure counts as finished.
  bool finished() noexcept;
  void wait_quietly() noexcept;

 private:
  enum class State { kQueued, kIssued, kDone, kFailed };

  // With the lock held, once it is not queued: throws what failed.
  void await_issue(std::unique_lock<std::mutex>& lock);

  const ForkGuard guard_;
  const std::shared_ptr<gpu::GpuDriver> driver_;
  const size_t bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kQueued;
  std::vector<gpu::EventId> events_;
  std::exception_ptr reason_;
};

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_COPY_HANDLE_H_
