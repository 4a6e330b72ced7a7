#include "os/lost_ranges.h"

#include <algorithm>
#include <array>
#include <mutex>

namespace cxl_offload::os {
namespace internal {
constinit std::atomic<bool> any_loss{false};
}

namespace {

// How many losses may wait for a thread to read them. If more come at once, the addresses of the
// rest are not known.
constexpr size_t kUnread = 1024;

struct Note {
  std::atomic<uint64_t> number{0};  // 0: the slot is empty, or still being written
  uintptr_t begin = 0;
  size_t bytes = 0;
  LossKind kind = LossKind::kUsed;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

constinit std::array<Note, kUnread> notes{};
constinit std::atomic<uint64_t> written{0};  // numbers given out
constinit std::atomic<uint64_t> read{0};     // numbers up to here are in the list
constinit std::atomic<uint64_t> unknown{0};

// The list of losses. It is never destroyed, because memory is given back while the process exits.
struct Standing {
  std::mutex mutex;
  std::vector<Loss> losses;
};

Standing& standing() {
  static Standing* const only = new Standing;
  return *only;
}

// Moves what handlers wrote down into the list. The caller holds the lock.
void take_over(std::vector<Loss>& losses) {
  for (;;) {
    const uint64_t next = read.load(std::memory_order_relaxed) + 1;
    Note& note = notes[next % kUnread];
    if (note.number.load(std::memory_order_acquire) != next) return;
    const Loss loss{next, {reinterpret_cast<const std::byte*>(note.begin), note.bytes}, note.kind};
    const bool is_known = std::ranges::any_of(losses, [&](const Loss& other) {
      return other.range.data() == loss.range.data() && other.range.size() == loss.range.size();
    });
    if (!is_known) losses.push_back(loss);
    note.number.store(0, std::memory_order_relaxed);
    read.store(next, std::memory_order_release);
  }
}

// These take addresses rather than pointers, because a search may begin at 0.
struct Bounds {
  uintptr_t begin = 0;
  uintptr_t end = UINTPTR_MAX;
};

Bounds bounds_of(std::span<const std::byte> range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  return {begin, begin + range.size()};
}

// Appends the part of a loss that lies inside of the bounds.
void append_part(const Loss& loss, const Bounds& bounds, std::vector<Loss>& parts) {
  const Bounds lost = bounds_of(loss.range);
  const uintptr_t begin = std::max(bounds.begin, lost.begin);
  const uintptr_t end = std::min(bounds.end, lost.end);
  if (begin >= end) return;
  parts.push_back({loss.number, loss.range.subspan(begin - lost.begin, end - begin), loss.kind});
}

std::vector<Loss> losses_between(const Bounds& bounds) {
  std::vector<Loss> found;
  if (!any_loss()) return found;
  Standing& all = standing();
  const std::lock_guard lock(all.mutex);
  take_over(all.losses);
  for (const Loss& loss : all.losses) append_part(loss, bounds, found);
  return found;
}

}  // namespace

void record_loss(std::span<const std::byte> range, LossKind kind) noexcept {
  uint64_t number = written.load(std::memory_order_relaxed);
  do {
    if (number - read.load(std::memory_order_acquire) >= kUnread) {
      unknown.fetch_add(1, std::memory_order_relaxed);
      internal::any_loss.store(true, std::memory_order_release);
      return;
    }
  } while (!written.compare_exchange_weak(number, number + 1, std::memory_order_acq_rel));
  Note& note = notes[(number + 1) % kUnread];
  note.begin = reinterpret_cast<uintptr_t>(range.data());
  note.bytes = range.size();
  note.kind = kind;
  note.number.store(number + 1, std::memory_order_release);
  internal::any_loss.store(true, std::memory_order_release);
}

std::vector<Loss> losses_in(std::span<const std::byte> range) {
  return losses_between(bounds_of(range));
}

std::vector<Loss> losses() { return losses_between({}); }

void settle(std::span<const std::byte> range) noexcept {
  if (!any_loss()) return;
  Standing& all = standing();
  const std::lock_guard lock(all.mutex);
  try {
    take_over(all.losses);
    std::vector<Loss> left;
    const Bounds settled = bounds_of(range);
    for (const Loss& loss : all.losses) {
      append_part(loss, {0, settled.begin}, left);
      append_part(loss, {settled.end, UINTPTR_MAX}, left);
    }
    all.losses = std::move(left);
    if (!all.losses.empty() || unknown.load() != 0) return;
    internal::any_loss.store(false, std::memory_order_seq_cst);
    take_over(all.losses);  // also takes what was written down meanwhile
    if (!all.losses.empty()) internal::any_loss.store(true, std::memory_order_release);
  } catch (
      ...) {  // no memory for the list: the losses stand, which is wrong only for bytes written
  }
}

uint64_t loss_count() noexcept { return written.load(std::memory_order_relaxed); }

uint64_t unknown_losses() noexcept { return unknown.load(std::memory_order_relaxed); }

void hold_losses_for_fork() noexcept { standing().mutex.lock(); }

void release_losses_after_fork() noexcept { standing().mutex.unlock(); }

}  // namespace cxl_offload::os
