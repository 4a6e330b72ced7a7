// The addresses of this package's memory, as a signal handler can read them: without locks.
//
// Mappings and devices enter their ranges here, whether or not anybody survives memory failures, so
// that it can be turned on at any time.
#ifndef CXL_OFFLOAD_OS_WATCHED_RANGES_H_
#define CXL_OFFLOAD_OS_WATCHED_RANGES_H_

#include <cstddef>
#include <optional>
#include <span>

namespace cxl_offload::os {

struct WatchedRange {
  std::span<std::byte> range;
  size_t page_bytes = 0;   // what is lost at once, at least
  bool is_shared = false;  // of a device or file, which may go away or become shorter
};

// Enters a range that is not entered yet. Where the table is full it stays out: a failure there
// ends the process, as everywhere.
void watch(const WatchedRange& watched) noexcept;
// Takes whole pages out, and waits until no handler works on them. Before they are unmapped.
void unwatch(std::span<std::byte> range) noexcept;
// Ranges that did not fit into the table, since the process began.
size_t unwatched_ranges() noexcept;

// What a handler has in hand: while it lives, no range is taken out. Safe in signal handlers.
class WatchedReading {
 public:
  WatchedReading() noexcept;
  ~WatchedReading();
  WatchedReading(const WatchedReading&) = delete;
  WatchedReading& operator=(const WatchedReading&) = delete;

  std::optional<WatchedRange> find(const std::byte* address) const noexcept;
};

// In a forked child: the handlers of the parent's other threads are not here.
void forget_parents_readings() noexcept;

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_WATCHED_RANGES_H_
