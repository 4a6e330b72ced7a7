// Bytes of watched ranges that are gone: written down by a signal handler, read by everybody else.
//
// A loss stands until its bytes are written anew or belong to nobody (`settle`). As long as none
// stands, asking costs one load.
#ifndef CXL_OFFLOAD_OS_LOST_RANGES_H_
#define CXL_OFFLOAD_OS_LOST_RANGES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cxl_offload::os {

// How it became known.
enum class LossKind : int {
  kUsed,   // by using it: BUS_MCEERR_AR
  kEarly,  // before anybody used it: BUS_MCEERR_AO
  kGone,   // the file or device behind it: BUS_ADRERR
  kAsked,  // by asking the pages
};

struct Loss {
  uint64_t number = 0;  // counted from 1
  std::span<const std::byte> range;
  LossKind kind = LossKind::kUsed;
};

namespace internal {
extern std::atomic<bool> any_loss;
}

// Whether any loss stands.
inline bool any_loss() noexcept { return internal::any_loss.load(std::memory_order_acquire); }

// Writes a loss down. Safe in signal handlers.
void record_loss(std::span<const std::byte> range, LossKind kind) noexcept;
// Those that stand, as far as they lie in `range`; oldest first.
std::vector<Loss> losses_in(std::span<const std::byte> range);
std::vector<Loss> losses();
// The bytes were written anew, or are nobody's.
void settle(std::span<const std::byte> range) noexcept;
// How many were ever written down; how many of them found no room, so that nobody knows where.
uint64_t loss_count() noexcept;
uint64_t unknown_losses() noexcept;

// Around a fork: a child must not find the list locked by a thread that it does not have.
void hold_losses_for_fork() noexcept;
void release_losses_after_fork() noexcept;

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_LOST_RANGES_H_
