#include "memory/allocation.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "memory/pool.h"
#include "memory/retirement.h"

namespace cxl_offload::memory {

Allocation::Allocation(Key, std::shared_ptr<Pool> pool, size_t bytes)
    : pool_(std::move(pool)), bytes_(bytes) {
  if (pool_->waits_for_gpu()) fence_.emplace_back();
}

Allocation::~Allocation() {
  if (block_ != nullptr) pool_->take_back(*this);
}

bool Allocation::owns_pages() const {
  return block_ != nullptr && capacity_ >= pool_->page_bytes();
}

bool Allocation::pinned() const { return block_ != nullptr && region()->registered(); }

Region* Allocation::region() const {
  return block_ == nullptr ? nullptr : pool_->region_of(*block_);
}

size_t Allocation::offset() const {
  return block_ == nullptr ? 0 : static_cast<size_t>(address_ - region()->range().data());
}

void Allocation::record_stream(gpu::StreamId stream) {
  if (block_ == nullptr || fence_.empty()) return;
  const std::lock_guard lock(fence_mutex_);
  auto& [block, bytes, displaced, streams, events] = fence_.front();
  if (std::find(streams.begin(), streams.end(), stream) != streams.end()) return;
  events.reserve(streams.size() + 1);
  streams.push_back(stream);
}

std::vector<gpu::StreamId> Allocation::streams() const {
  if (fence_.empty()) return {};
  const std::lock_guard lock(fence_mutex_);
  return fence_.front().streams;
}

void Allocation::displace() {
  if (!owns_pages()) {
    throw InvalidArgument("move " + format_bytes(bytes_) + ": it shares its page of " +
                          format_bytes(pool_->page_bytes()) +
                          " with others; only allocations of a page or more can move");
  }
  displaced_ = true;
}

}  // namespace cxl_offload::memory
