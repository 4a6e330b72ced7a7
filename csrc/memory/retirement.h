// Dropped blocks that a GPU may still be using.
#ifndef CXL_OFFLOAD_MEMORY_RETIREMENT_H_
#define CXL_OFFLOAD_MEMORY_RETIREMENT_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/driver.h"

namespace cxl_offload::memory {

struct Extent;

struct Retired {
  Extent* block = nullptr;
  size_t bytes = 0;
  bool displaced = false;
  std::vector<gpu::StreamId> streams;
  std::vector<gpu::EventId> events;  // with room for one per stream
};

// A block whose streams are known is done when its events are. A block without known streams is
// done after a synchronize, which covers all blocks that were dropped before it. Any thread may
// call `add` at any time. One thread at a time may call the functions that return blocks, and never
// with a lock that callers of `add` need.
class Retirement {
 public:
  explicit Retirement(std::shared_ptr<gpu::GpuDriver> driver) : driver_(std::move(driver)) {}
  ~Retirement();
  Retirement(const Retirement&) = delete;
  Retirement& operator=(const Retirement&) = delete;

  // Puts events behind the work that is queued on the block's streams now. Needs no memory.
  void add(std::list<Retired>& block) noexcept;

  // Returns blocks that are done. It looks at the longest waiting ones only, because otherwise a
  // long queue would make every call slow.
  std::list<Retired> poll();
  // Waits for the longest waiting block of `least` to `most` bytes and returns what is done then;
  // nothing if there is no such block. If it throws no block is forgotten.
  std::list<Retired> wait(size_t least, size_t most);
  // Waits for all blocks that are there now.
  std::list<Retired> wait_all();
  // Gives up waiting. It is for a driver that cannot synchronize any more, and so runs nothing any
  // more.
  std::list<Retired> abandon() noexcept;

  uint64_t synchronizations() const;
  uint64_t event_waits() const;

 private:
  bool done(Retired& block) noexcept;
  void wait_for(Retired& block);
  void destroy_events(Retired& block) noexcept;
  std::list<Retired> synchronize();

  const std::shared_ptr<gpu::GpuDriver> driver_;
  mutable std::mutex mutex_;     // guards what follows; never held while the driver is called
  std::list<Retired> fenced_;    // with events; the longest waiting first
  std::list<Retired> unfenced_;  // used on streams that nobody named
  uint64_t synchronizations_ = 0;
  uint64_t event_waits_ = 0;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_RETIREMENT_H_
