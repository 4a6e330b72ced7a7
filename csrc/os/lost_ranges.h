// The bytes of watched ranges that are lost. A signal handler writes them down, and all others read
// them.
//
// A loss stays in the list until its bytes are written again or belong to nobody (`settle`). While
// the list is empty, asking takes one load.
#ifndef CXL_OFFLOAD_OS_LOST_RANGES_H_
#define CXL_OFFLOAD_OS_LOST_RANGES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cxl_offload::os {

// How a loss became known.
enum class LossKind : int {
  kUsed,   // something used the bytes: BUS_MCEERR_AR
  kEarly,  // the kernel told of them before anything used them: BUS_MCEERR_AO
  kGone,   // the file or device behind them is gone: BUS_ADRERR
  kAsked,  // the pages were asked
};

struct Loss {
  uint64_t number = 0;  // counted from 1
  std::span<const std::byte> range;
  LossKind kind = LossKind::kUsed;
};

namespace internal {
extern std::atomic<bool> any_loss;
}

// Whether there is any loss in the list.
inline bool any_loss() noexcept { return internal::any_loss.load(std::memory_order_acquire); }

// Writes a loss down. Safe in signal handlers.
void record_loss(std::span<const std::byte> range, LossKind kind) noexcept;
// Returns the losses, oldest first, and of each the part that lies in `range`.
std::vector<Loss> losses_in(std::span<const std::byte> range);
std::vector<Loss> losses();
// Says that the bytes were written again, or that they belong to nobody.
void settle(std::span<const std::byte> range) noexcept;
// How many losses were ever written down, and for how many of them there was no room, so that their
// addresses are not known.
uint64_t loss_count() noexcept;
uint64_t unknown_losses() noexcept;

// These are called around a fork. Otherwise a child might find the list locked by a thread that it
// does not have.
void hold_losses_for_fork() noexcept;
void release_losses_after_fork() noexcept;

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_LOST_RANGES_H_
