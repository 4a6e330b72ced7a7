#include "memory/block_heap.h"

#include <algorithm>
#include <cstdint>
#include <new>

#include "core/error.h"
#include "core/rounding.h"

namespace cxl_offload::memory {
namespace {

// The widest vector register is 64 bytes, and so is a cache line.
constexpr size_t kAlignment = 64;
constexpr size_t kSlabBytes = size_t{64} << 10;
constexpr size_t kMinChunkBytes = size_t{64} << 10;
constexpr size_t kMaxChunkBytes = size_t{64} << 20;
// Chunks of pinned memory are smaller, because nothing of such a chunk can be returned while a
// block in it is alive.
constexpr size_t kPinnedChunkFraction = 4096;
// How many free extents are tried to find one where the pattern of a stripe begins.
constexpr int kMaxCandidates = 16;

}  // namespace

Region* BlockHeap::region_of(const Extent* block, size_t page_bytes) {
  const Extent* pages =
      block->bytes < page_bytes ? static_cast<SlabArena*>(block->arena)->pages : block;
  return owner(pages)->region.get();
}

BlockHeap::BlockHeap(size_t page_bytes)
    : page_bytes_(page_bytes), slab_bytes_(round_up(kSlabBytes, page_bytes)) {}

size_t BlockHeap::capacity_for(size_t bytes) const {
  if (bytes > SIZE_MAX / 2 - page_bytes_) {
    throw OutOfMemory("allocate " + format_bytes(bytes) + ": more than an address space holds");
  }
  const size_t small = round_up(bytes, kAlignment);
  return small < page_bytes_ ? small : round_up(bytes, page_bytes_);
}

size_t BlockHeap::largest_fit(size_t capacity) { return capacity + capacity / kSlackFraction; }

Extent* BlockHeap::count_held(Extent* block, size_t bytes) noexcept {
  statistics_.asked.add(bytes);
  statistics_.held.add(block->bytes);
  count_cached();
  return block;
}

void BlockHeap::count_cached() noexcept {
  statistics_.cached.bytes.set(pages_.free_bytes() + singles_.free_bytes() + small_.free_bytes());
  statistics_.cached.count.set(pages_.free_count() + singles_.free_count() + small_.free_count());
}

Extent* BlockHeap::reuse(size_t bytes) {
  const size_t capacity = capacity_for(bytes);
  Extent* block = capacity < page_bytes_ ? take_small(capacity) : take_pages(capacity);
  if (block == nullptr) return nullptr;
  ++statistics_.reuses;
  return count_held(block, bytes);
}

Extent* BlockHeap::take_pages(size_t capacity) {
  Extent* pages = take_single(capacity);
  if (pages == nullptr) pages = take_cut(capacity, capacity);
  // Extents of this size have a place where the pattern starts, wherever they lie.
  if (pages == nullptr && cut_bytes_ > page_bytes_) {
    pages = take_cut(capacity, capacity + cut_bytes_ - page_bytes_);
  }
  if (pages != nullptr) make_busy(*owner(pages));
  return pages;
}

Extent* BlockHeap::take_single(size_t capacity) {
  auto candidate = singles_.best_fit(capacity);
  for (int i = 0; i < kMaxCandidates && candidate != singles_.end(); ++i, ++candidate) {
    Extent* extent = candidate->second;
    if (extent->bytes > largest_fit(capacity)) break;
    if (owner(extent)->region->keeps_rule(0, capacity)) {
      return singles_.take(extent, 0, extent->bytes);
    }
  }
  return nullptr;
}

Extent* BlockHeap::take_cut(size_t capacity, size_t extent_bytes) {
  auto candidate = pages_.best_fit(extent_bytes);
  for (int i = 0; i < kMaxCandidates && candidate != pages_.end(); ++i, ++candidate) {
    Extent* extent = candidate->second;
    const RegionArena& arena = *owner(extent);
    if (!arena.striped) return pages_.take(extent, 0, capacity);
    const auto offset = static_cast<size_t>(extent->begin - arena.begin);
    const size_t cut = arena.region->next_cut(offset);
    if (cut + capacity <= offset + extent->bytes && arena.region->keeps_rule(cut, capacity)) {
      return pages_.take(extent, cut - offset, capacity);
    }
  }
  return nullptr;
}

Extent* BlockHeap::take_small(size_t capacity) {
  const auto candidate = small_.best_fit(capacity);
  if (candidate != small_.end()) return small_.take(candidate->second, 0, capacity);
  std::list<SlabArena> slab(1);
  small_.reserve(3);  // done now, because nothing may fail once the pages are taken
  Extent* pages = take_pages(slab_bytes_);
  if (pages == nullptr && slab_bytes_ > page_bytes_) pages = take_pages(page_bytes_);
  return pages == nullptr ? nullptr : cut_slab(slab, pages, capacity);
}

Extent* BlockHeap::cut_slab(std::list<SlabArena>& slab, Extent* pages, size_t capacity) {
  SlabArena& arena = slab.front();
  arena.begin = pages->begin;
  arena.bytes = pages->bytes;
  arena.pages = pages;
  arena.self = slab.begin();
  slabs_.splice(slabs_.end(), slab);
  return small_.take(small_.give_back(small_.add(&arena)), 0, capacity);
}

size_t BlockHeap::least_growth_for(size_t bytes) const { return round_up(bytes, page_bytes_); }

size_t BlockHeap::growth_for(size_t bytes) const {
  const size_t capacity = capacity_for(bytes);
  const size_t least = capacity < page_bytes_ ? slab_bytes_ : capacity;
  if (!shares_regions_) return least;
  const size_t chunk =
      round_up(std::clamp<size_t>(statistics_.mapped.bytes.current /
                                      (pinned_ ? kPinnedChunkFraction : kChunkFraction),
                                  kMinChunkBytes, kMaxChunkBytes),
               page_bytes_);
  // More than half a chunk gets a region of its own, so chunks hold at least two blocks.
  return least > chunk / 2 ? least : chunk;
}

size_t BlockHeap::excess(size_t growth, size_t growing) const {
  const Gauge& held = statistics_.held.bytes;
  const size_t needed = std::max(held.peak, held.current + growth);
  const size_t allowed = needed + needed / kSlackFraction + round_up(kMinChunkBytes, page_bytes_);
  const size_t mapped = statistics_.mapped.bytes.current + growing + growth;
  return mapped > allowed ? mapped - allowed : 0;
}

size_t BlockHeap::returnable_bytes() const { return pinned_ ? idle_bytes_ : pages_.free_bytes(); }

Extent* BlockHeap::adopt(std::unique_ptr<Region>& region, size_t bytes, Reclaimed& rest) {
  const size_t capacity = capacity_for(bytes);
  const auto range = region->range();
  std::list<RegionArena> fresh(1);
  RegionArena& arena = fresh.front();
  arena.begin = range.data();
  arena.bytes = arena.mapped_bytes = range.size();
  arena.self = fresh.begin();
  arena.reusable = region->keeps_rule(0, range.size());
  cut_bytes_ = region->next_cut(1);
  arena.striped = cut_bytes_ > page_bytes_;
  pinned_ = region->pinned();
  arena.single = pinned_ && range.size() == capacity;
  shares_regions_ = arena.reusable && !arena.striped;
  std::list<SlabArena> slab(1);
  map_of(arena).reserve(2);
  small_.reserve(3);

  arena.region = std::move(region);  // from here on nothing fails
  busy_.splice(busy_.end(), fresh);
  statistics_.mapped.add(arena.bytes);
  ++statistics_.growths;
  Extent* pages = map_of(arena).add(&arena);
  const size_t taken = capacity < page_bytes_ ? std::min(slab_bytes_, arena.bytes) : capacity;
  if (taken < arena.bytes) {
    rest = free_pages(map_of(arena).split(pages, taken), false);
  }
  return count_held(capacity < page_bytes_ ? cut_slab(slab, pages, capacity) : pages, bytes);
}

void BlockHeap::make_busy(RegionArena& arena) noexcept {
  if (!arena.idle) return;
  arena.idle = false;
  idle_bytes_ -= arena.mapped_bytes;
  busy_.splice(busy_.end(), idle_, arena.self);
}

void BlockHeap::wait(Extent* block, size_t bytes) noexcept {
  statistics_.asked.subtract(bytes);
  statistics_.held.subtract(block->bytes);
  statistics_.waiting.add(block->bytes);
  block->state = ExtentState::kWaiting;
}

Reclaimed BlockHeap::free_held(Extent* block, size_t bytes, bool displaced) noexcept {
  statistics_.asked.subtract(bytes);
  statistics_.held.subtract(block->bytes);
  return free_block(block, displaced);
}

Reclaimed BlockHeap::free_waiting(Extent* block, bool displaced) noexcept {
  statistics_.waiting.subtract(block->bytes);
  return free_block(block, displaced);
}

Reclaimed BlockHeap::free_block(Extent* block, bool displaced) noexcept {
  Reclaimed reclaimed;
  if (block->bytes >= page_bytes_) {
    reclaimed = free_pages(block, displaced);
  } else {
    auto& slab = *static_cast<SlabArena*>(block->arena);
    small_.give_back(block);
    if (slab.taken == 0) {
      Extent* pages = slab.pages;
      small_.remove(&slab);
      slabs_.erase(slab.self);
      reclaimed = free_pages(pages, false);
    }
  }
  count_cached();
  return reclaimed;
}

Reclaimed BlockHeap::free_pages(Extent* pages, bool displaced) noexcept {
  RegionArena& arena = *owner(pages);
  if (!displaced && arena.reusable) {
    map_of(arena).give_back(pages);
  } else if (arena.region->pinned() || arena.taken == arena.lost + 1) {
    pages->state = ExtentState::kLost;
    ++arena.lost;
    statistics_.lost.add(pages->bytes);
  } else {
    return start_leaving(pages, false);
  }
  return settle(arena);
}

// Even the last part of a region is returned by itself; finish() then returns the region.
Reclaimed BlockHeap::start_leaving(Extent* part, bool reusable) noexcept {
  part->state = ExtentState::kLeaving;
  owner(part)->mapped_bytes -= part->bytes;
  statistics_.mapped.bytes.subtract(part->bytes);
  return {nullptr, part, part->bytes, reusable};
}

Reclaimed BlockHeap::settle(RegionArena& arena) noexcept {
  if (arena.taken > arena.lost) return {};
  if (arena.lost > 0 || !arena.reusable || arena.first == nullptr) return detach(arena);
  arena.idle = true;
  idle_bytes_ += arena.mapped_bytes;
  idle_.splice(idle_.end(), busy_, arena.self);
  return {};
}

Reclaimed BlockHeap::detach(RegionArena& arena) noexcept {
  make_busy(arena);
  for (const Extent* extent = arena.first; extent != nullptr; extent = extent->next) {
    if (extent->state == ExtentState::kLost) statistics_.lost.subtract(extent->bytes);
  }
  map_of(arena).remove(&arena);
  statistics_.mapped.subtract(arena.mapped_bytes);
  Reclaimed reclaimed{std::move(arena.region), nullptr, arena.mapped_bytes, false};
  busy_.erase(arena.self);
  return reclaimed;
}

std::vector<Reclaimed> BlockHeap::collect(size_t bytes, size_t least_part) {
  std::vector<Reclaimed> batch;
  const auto count = [&](size_t gone) { bytes -= std::min(bytes, gone); };
  try {
    while (bytes > 0 && !idle_.empty()) {
      RegionArena& oldest = idle_.front();
      const size_t mapped = oldest.mapped_bytes;
      if (!oldest.region->pinned() && mapped > bytes) break;
      batch.emplace_back();  // done before anything is taken out, because this needs memory
      batch.back() = detach(oldest);
      count(mapped);
    }
    while (bytes > 0) {
      Extent* largest = pages_.largest();
      if (largest == nullptr || largest->bytes < least_part) break;
      RegionArena& arena = *owner(largest);
      if (arena.region->pinned()) break;
      const size_t part = bytes < largest->bytes ? round_up(bytes, page_bytes_) : largest->bytes;
      batch.emplace_back();
      Extent* taken = pages_.take(largest, largest->bytes - part, part);
      make_busy(arena);
      batch.back() = start_leaving(taken, true);
      count(part);
    }
  } catch (const std::bad_alloc&) {  // go on with what is in the batch
    if (!batch.empty() && !batch.back()) batch.pop_back();
  }
  count_cached();
  return batch;
}

Reclaimed BlockHeap::finish(Reclaimed& reclaimed, bool left) noexcept {
  Extent* part = reclaimed.part;
  if (part == nullptr) return {};
  RegionArena& arena = *owner(part);
  if (left) {
    map_of(arena).remove(part);
  } else {
    arena.mapped_bytes += part->bytes;
    statistics_.mapped.bytes.add(part->bytes);
    if (reclaimed.reusable) {
      map_of(arena).give_back(part);
    } else {
      part->state = ExtentState::kLost;
      ++arena.lost;
      statistics_.lost.add(part->bytes);
    }
  }
  reclaimed.part = nullptr;
  Reclaimed rest = settle(arena);
  count_cached();
  return rest;
}

}  // namespace cxl_offload::memory
