// Owns one block of a pool. The block goes back to the pool when the last owner drops it.
#ifndef CXL_OFFLOAD_MEMORY_ALLOCATION_H_
#define CXL_OFFLOAD_MEMORY_ALLOCATION_H_

#include <atomic>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/driver.h"
#include "memory/region.h"

namespace cxl_offload::memory {

class Pool;
struct Extent;
struct Retired;

// The destructor may run in any thread, without Python's lock and at interpreter exit. In a forked
// child it does nothing: the memory stays readable there, and the pool belongs to the parent.
class Allocation {
 public:
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  // The bytes are zero, or what an earlier owner left there. The address is null for an allocation
  // of no bytes. It is a multiple of the page for allocations of a page or more, and of 64 for
  // smaller ones.
  std::byte* address() const { return address_; }
  size_t bytes() const { return bytes_; }        // what was asked for
  size_t capacity() const { return capacity_; }  // what the block occupies
  // Whether the block has its pages to itself, as moving it requires.
  bool owns_pages() const;
  bool pinned() const;  // registered with a GPU driver now
  // The region that the block was cut from, and where. The region lives as long as the allocation.
  // It is null for an allocation of no bytes.
  Region* region() const;
  size_t offset() const;

  // Work queued on `stream` before the allocation is dropped must be done before the block is used
  // again. A pinned block without any recorded stream waits for all work of the GPU instead.
  // Does nothing for memory that is not pinned: the driver copies such memory before it returns.
  void record_stream(gpu::StreamId stream);
  std::vector<gpu::StreamId> streams() const;
  // Tells the pool that the block's pages were moved and no longer follow the rule of their region.
  // The pool will not use the block again. Throws InvalidArgument if it does not own its pages.
  void displace();

  // Allocations come from Pool::allocate.
  class Key {
    friend class Pool;
    Key() = default;
  };
  Allocation(Key key, std::shared_ptr<Pool> pool, size_t bytes);

 private:
  friend class Pool;

  std::shared_ptr<Pool> pool_;
  Extent* block_ = nullptr;
  std::byte* address_ = nullptr;
  size_t bytes_;
  size_t capacity_ = 0;
  std::atomic<bool> displaced_ = false;
  mutable std::mutex fence_mutex_;  // guards the streams in fence_
  // It has one entry if the pool waits for a GPU. The entry is made early, because dropping must
  // not need memory.
  std::list<Retired> fence_;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_ALLOCATION_H_
