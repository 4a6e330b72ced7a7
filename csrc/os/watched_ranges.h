// The addresses of this package's memory, in a form that a signal handler can read without locks.
//
// Mappings and devices always enter their ranges here, so that surviving memory failures can be
// turned on at any time.
#ifndef CXL_OFFLOAD_OS_WATCHED_RANGES_H_
#define CXL_OFFLOAD_OS_WATCHED_RANGES_H_

#include <cstddef>
#include <optional>
#include <span>

namespace cxl_offload::os {

struct WatchedRange {
  std::span<std::byte> range;
  size_t page_bytes = 0;   // at least so many bytes are lost at once
  bool is_shared = false;  // it is of a device or file, which may go away or become shorter
};

// Enters a range that is not entered yet. If the table is full the range is not watched, and a
// failure there ends the process.
void watch(const WatchedRange& watched) noexcept;
// Takes whole pages out, and waits until no handler works on them. Call it before they are
// unmapped.
void unwatch(std::span<std::byte> range) noexcept;
// How many ranges did not fit into the table since the process began.
size_t unwatched_ranges() noexcept;

// A handler holds this while it works: as long as it lives, no range is taken out. Safe in signal
// handlers.
class WatchedReading {
 public:
  WatchedReading() noexcept;
  ~WatchedReading();
  WatchedReading(const WatchedReading&) = delete;
  WatchedReading& operator=(const WatchedReading&) = delete;

  std::optional<WatchedRange> find(const std::byte* address) const noexcept;
};

// A forked child calls this, because it does not have the parent's other threads and their
// handlers.
void forget_parents_readings() noexcept;

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_WATCHED_RANGES_H_
