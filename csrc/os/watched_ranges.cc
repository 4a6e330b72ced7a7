#include "os/watched_ranges.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace cxl_offload::os {
namespace {

// A process with more regions than this has the rest of them unwatched.
constexpr size_t kSlots = 16384;

// `end` is 0 for a slot that nobody has, 1 for one that is being filled or emptied.
constexpr uintptr_t kFree = 0;
constexpr uintptr_t kBusy = 1;

struct Slot {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{kFree};
  std::atomic<size_t> page_bytes{0};
  std::atomic<bool> is_shared{false};
};

static_assert(std::atomic<uintptr_t>::is_always_lock_free);

constinit std::array<Slot, kSlots> slots{};
constinit std::atomic<size_t> used_slots{0};  // none was ever used at or after this one
constinit std::atomic<size_t> left_out{0};
constinit std::atomic<int> readings{0};

uintptr_t first_of(std::span<std::byte> range) { return reinterpret_cast<uintptr_t>(range.data()); }

// A range that a reader has found stays valid until the reader is done.
void wait_for_readings() noexcept {
  while (readings.load(std::memory_order_seq_cst) != 0) sched_yield();
}

std::span<Slot> slots_in_use() {
  return std::span(slots).first(used_slots.load(std::memory_order_acquire));
}

bool fill(uintptr_t begin, uintptr_t end, size_t page_bytes, bool is_shared) noexcept {
  for (size_t at = 0; at < kSlots; ++at) {
    Slot& slot = slots[at];
    uintptr_t found = kFree;
    if (slot.end.load(std::memory_order_relaxed) != kFree ||
        !slot.end.compare_exchange_strong(found, kBusy, std::memory_order_acquire)) {
      continue;
    }
    slot.begin.store(begin, std::memory_order_relaxed);
    slot.page_bytes.store(page_bytes, std::memory_order_relaxed);
    slot.is_shared.store(is_shared, std::memory_order_relaxed);
    slot.end.store(end, std::memory_order_release);
    size_t used = used_slots.load(std::memory_order_relaxed);
    while (used <= at &&
           !used_slots.compare_exchange_weak(used, at + 1, std::memory_order_release)) {
    }
    return true;
  }
  left_out.fetch_add(1, std::memory_order_relaxed);
  return false;
}

}  // namespace

void watch(const WatchedRange& watched) noexcept {
  const uintptr_t begin = first_of(watched.range);
  fill(begin, begin + watched.range.size(), watched.page_bytes, watched.is_shared);
}

// A range belongs to one region, which changes it from one thread at a time while other threads may
// read it.
void unwatch(std::span<std::byte> range) noexcept {
  const uintptr_t begin = first_of(range);
  const uintptr_t end = begin + range.size();
  for (Slot& slot : slots_in_use()) {
    const uintptr_t slot_end = slot.end.load(std::memory_order_acquire);
    const uintptr_t slot_begin = slot.begin.load(std::memory_order_relaxed);
    if (slot_end <= kBusy || slot_end <= begin || slot_begin >= end) continue;
    if (slot_end > end) {  // the part behind stays; if there is no slot for it, it is not watched
      fill(end, slot_end, slot.page_bytes.load(), slot.is_shared.load());
    }
    if (slot_begin < begin) {
      slot.end.store(begin, std::memory_order_seq_cst);
      continue;
    }
    slot.end.store(kBusy, std::memory_order_seq_cst);
    wait_for_readings();
    slot.end.store(kFree, std::memory_order_release);
  }
  wait_for_readings();
}

size_t unwatched_ranges() noexcept { return left_out.load(std::memory_order_relaxed); }

WatchedReading::WatchedReading() noexcept { readings.fetch_add(1, std::memory_order_seq_cst); }

WatchedReading::~WatchedReading() { readings.fetch_sub(1, std::memory_order_release); }

std::optional<WatchedRange> WatchedReading::find(const std::byte* address) const noexcept {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  for (Slot& slot : slots_in_use()) {
    const uintptr_t end = slot.end.load(std::memory_order_seq_cst);
    const uintptr_t begin = slot.begin.load(std::memory_order_relaxed);
    if (end <= kBusy || wanted < begin || wanted >= end) continue;
    return WatchedRange{{reinterpret_cast<std::byte*>(begin), end - begin},
                        slot.page_bytes.load(std::memory_order_relaxed),
                        slot.is_shared.load(std::memory_order_relaxed)};
  }
  return std::nullopt;
}

void forget_parents_readings() noexcept { readings.store(0, std::memory_order_seq_cst); }

}  // namespace cxl_offload::os
