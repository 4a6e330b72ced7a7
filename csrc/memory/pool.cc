#include "memory/pool.h"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "memory/block_heap.h"
#include "memory/retirement.h"

namespace cxl_offload::memory {
namespace {

// When no free block fits, holes smaller than this stay cached, because returning a hole costs a
// mapping.
constexpr size_t kLeastPartBytes = size_t{64} << 10;

// Bytes that are being mapped, until they are part of the heap.
class Growing {
 public:
  Growing(std::mutex& mutex, size_t& growing, size_t bytes)
      : mutex_(mutex), growing_(growing), bytes_(bytes) {}
  ~Growing() {
    const std::lock_guard lock(mutex_);
    end();
  }
  Growing(const Growing&) = delete;
  Growing& operator=(const Growing&) = delete;

  // With the lock held.
  void end() {
    growing_ -= bytes_;
    bytes_ = 0;
  }

 private:
  std::mutex& mutex_;
  size_t& growing_;
  size_t bytes_;
};

}  // namespace

struct Pool::State {
  State(std::shared_ptr<RegionSource> from, std::shared_ptr<gpu::GpuDriver> driver)
      : source(std::move(from)), page_bytes(source->page_bytes()), heap(page_bytes) {
    if (driver != nullptr) retirement.emplace(std::move(driver));
  }
  ~State();

  Extent* find(size_t bytes);
  Extent* reuse(size_t bytes);
  Extent* reuse_retired(size_t bytes);
  Extent* grow(size_t bytes);
  Extent* adopt(std::unique_ptr<Region> region, size_t bytes, Growing& mapped);
  bool give_back_everything();
  size_t return_free(size_t bytes, size_t least_part);
  void free_retired(std::list<Retired> blocks) noexcept;
  void wait_for_gpu();
  void free_done();
  void track(const Reclaimed& reclaimed) { returning += reclaimed ? 1 : 0; }  // with the lock
  size_t send(Reclaimed reclaimed) noexcept;

  const std::shared_ptr<RegionSource> source;
  const size_t page_bytes;
  std::optional<Retirement> retirement;
  std::mutex settling;  // held by who asks the GPU; always before `mutex`

  std::mutex mutex;  // guards what follows
  BlockHeap heap;
  size_t growing = 0;    // bytes being mapped
  size_t returning = 0;  // how many parts are being returned
  std::condition_variable all_returned;
};

Extent* Pool::State::find(size_t bytes) {
  if (Extent* block = reuse(bytes)) return block;
  if (retirement.has_value()) {
    if (Extent* block = reuse_retired(bytes)) return block;
  }
  return grow(bytes);
}

Extent* Pool::State::reuse(size_t bytes) {
  const std::lock_guard lock(mutex);
  return heap.reuse(bytes);
}

// While the pool may still map more, that is cheaper than waiting for the GPU.
Extent* Pool::State::reuse_retired(size_t bytes) {
  size_t capacity = 0, excess = 0, returnable = 0;
  const auto look = [&] {
    const std::lock_guard lock(mutex);
    capacity = heap.capacity_for(bytes);
    excess = heap.excess(heap.growth_for(bytes), growing);
    returnable = heap.returnable_bytes();
  };
  look();
  std::unique_lock settle(settling, std::try_to_lock);
  if (!settle.owns_lock()) {
    if (excess == 0) return nullptr;
    settle.lock();
  }
  free_retired(retirement->poll());
  for (;;) {
    if (Extent* block = reuse(bytes)) return block;
    look();
    if (excess == 0) return nullptr;
    auto done = retirement->wait(capacity, BlockHeap::largest_fit(capacity));
    if (done.empty() && excess > returnable) done = retirement->wait(0, SIZE_MAX);
    if (done.empty()) return nullptr;
    free_retired(std::move(done));
  }
}

Extent* Pool::State::grow(size_t bytes) {
  size_t growth = 0;
  std::vector<Reclaimed> surplus;
  {
    const std::lock_guard lock(mutex);
    growth = heap.growth_for(bytes);
    surplus = heap.collect(heap.excess(growth, growing), std::max(page_bytes, kLeastPartBytes));
    for (const Reclaimed& reclaimed : surplus) track(reclaimed);
    growing += growth;
  }
  Growing while_mapping(mutex, growing, growth);
  for (Reclaimed& reclaimed : surplus) send(std::move(reclaimed));
  for (bool fruitless = false;;) {
    try {
      return adopt(source->obtain(growth), bytes, while_mapping);
    } catch (const OutOfMemory&) {
      const bool returned = give_back_everything();
      if (!returned && fruitless) throw;
      fruitless = !returned;
    }
    if (Extent* block = reuse(bytes)) return block;
    growth = heap.least_growth_for(bytes);
  }
}

Extent* Pool::State::adopt(std::unique_ptr<Region> region, size_t bytes, Growing& mapped) {
  Extent* block = nullptr;
  Reclaimed rest;
  {
    const std::lock_guard lock(mutex);
    block = heap.adopt(region, bytes, rest);
    mapped.end();
    track(rest);
  }
  send(std::move(rest));
  return block;
}

// Also waits for memory that other threads are giving back. Returns whether anything was given
// back.
bool Pool::State::give_back_everything() {
  try {
    wait_for_gpu();
  } catch (...) {  // the error of the next attempt is the one to report
  }
  const bool returned = return_free(SIZE_MAX, page_bytes) > 0;
  std::unique_lock lock(mutex);
  const bool waited = returning > 0;
  all_returned.wait(lock, [&] { return returning == 0; });
  return returned || waited;
}

size_t Pool::State::return_free(size_t bytes, size_t least_part) {
  std::vector<Reclaimed> batch;
  {
    const std::lock_guard lock(mutex);
    batch = heap.collect(bytes, least_part);
    for (const Reclaimed& reclaimed : batch) track(reclaimed);
  }
  size_t returned = 0;
  for (Reclaimed& reclaimed : batch) returned += send(std::move(reclaimed));
  return returned;
}

// Returns memory to where it came from, without holding the lock. Returns how many bytes that was.
size_t Pool::State::send(Reclaimed reclaimed) noexcept {
  size_t returned = 0;
  while (reclaimed) {
    bool left = true;
    if (reclaimed.region != nullptr) {
      reclaimed.region.reset();
    } else {
      Region* region = BlockHeap::region_of(reclaimed.part, page_bytes);
      const auto offset = static_cast<size_t>(reclaimed.part->begin - region->range().data());
      try {
        region->release(offset, reclaimed.bytes);
      } catch (...) {  // too many mappings: it stays cached
        left = false;
      }
    }
    if (left) returned += reclaimed.bytes;
    const std::lock_guard lock(mutex);
    reclaimed = heap.finish(reclaimed, left);
    if (reclaimed) continue;
    --returning;
    all_returned.notify_all();
  }
  return returned;
}

void Pool::State::free_retired(std::list<Retired> blocks) noexcept {
  for (const Retired& retired : blocks) {
    Reclaimed reclaimed;
    {
      const std::lock_guard lock(mutex);
      reclaimed = heap.free_waiting(retired.block, retired.displaced);
      track(reclaimed);
    }
    send(std::move(reclaimed));
  }
}

void Pool::State::wait_for_gpu() {
  if (!retirement.has_value()) return;
  const std::lock_guard settle(settling);
  free_retired(retirement->wait_all());
}

void Pool::State::free_done() {
  if (!retirement.has_value()) return;
  const std::lock_guard settle(settling);
  free_retired(retirement->poll());
}

Pool::Pool(std::shared_ptr<RegionSource> source, std::shared_ptr<gpu::GpuDriver> driver)
    : state_(std::make_unique<State>(std::move(source), std::move(driver))) {}

Pool::State::~State() {
  try {
    wait_for_gpu();
  } catch (...) {  // a context that cannot synchronize runs nothing any more
    free_retired(retirement->abandon());
  }
}

Pool::~Pool() = default;

std::shared_ptr<Allocation> Pool::allocate(size_t bytes) {
  State& state = state_.use("allocate");
  auto allocation = std::make_shared<Allocation>(Allocation::Key(), shared_from_this(), bytes);
  if (bytes == 0) return allocation;
  Extent* block = state.find(bytes);
  allocation->block_ = block;
  allocation->address_ = block->begin;
  allocation->capacity_ = block->bytes;
  return allocation;
}

Trimmed Pool::trim() {
  State* state = state_.here();
  if (state == nullptr) return {};
  Trimmed trimmed;
  try {
    state->wait_for_gpu();
  } catch (const std::exception& error) {  // what the GPU may still use stays; all else goes
    trimmed.kept_because = error.what();
    state->free_done();
  }
  trimmed.bytes = state->return_free(SIZE_MAX, state->page_bytes);
  return trimmed;
}

void Pool::give_back() noexcept {
  if (State* state = state_.here()) state->give_back_everything();
}

Statistics Pool::statistics() const {
  State* state = state_.here();
  if (state == nullptr) return {};
  const std::lock_guard lock(state->mutex);
  Statistics statistics = state->heap.statistics();
  if (state->retirement.has_value()) {
    statistics.synchronizations = state->retirement->synchronizations();
    statistics.event_waits = state->retirement->event_waits();
  }
  return statistics;
}

size_t Pool::page_bytes() const { return state_.constants().page_bytes; }

bool Pool::waits_for_gpu() const { return state_.constants().retirement.has_value(); }

Region* Pool::region_of(const Extent& block) const {
  return BlockHeap::region_of(&block, page_bytes());
}

void Pool::take_back(Allocation& allocation) noexcept {
  State* here = state_.here();
  if (here == nullptr) return;
  State& state = *here;
  Extent* block = allocation.block_;
  if (state.retirement.has_value()) {
    Retired& retired = allocation.fence_.front();
    retired.block = block;
    retired.bytes = block->bytes;
    retired.displaced = allocation.displaced_;
    {
      const std::lock_guard lock(state.mutex);
      state.heap.wait(block, allocation.bytes_);
    }
    state.retirement->add(allocation.fence_);
    return;
  }
  Reclaimed reclaimed;
  {
    const std::lock_guard lock(state.mutex);
    reclaimed = state.heap.free_held(block, allocation.bytes_, allocation.displaced_);
    state.track(reclaimed);
  }
  state.send(std::move(reclaimed));
}

void Pool::check_invariants() const {
  State& state = state_.use("check a pool");
  const std::lock_guard lock(state.mutex);
  state.heap.check_invariants();
}

}  // namespace cxl_offload::memory
