// One transfer, for its owner.
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

  // The engine calls this. `events` are behind the last copies of all streams that were used. The
  // handle owns them from now on.
  void issued(std::vector<gpu::EventId> events);
  // Says that nothing of it is running any more.
  void failed(std::exception_ptr reason);
  // Does what query does, but a failure counts as finished.
  bool finished() noexcept;
  void wait_quietly() noexcept;

 private:
  enum class State { kQueued, kIssued, kDone, kFailed };

  // Throws what failed. The caller holds the lock, and the transfer is no longer queued.
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
