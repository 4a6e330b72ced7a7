// Lets the process survive memory that fails: SIGBUS for a lost page of a watched range
// (os/watched_ranges.h).
//
// The lost pages are replaced by fresh ones full of 0xff, which is NaN in every float type. The
// loss is written down (os/lost_ranges.h), and the access goes on. Any other SIGBUS is left to the
// handler that was there before.
#ifndef CXL_OFFLOAD_OS_MEMORY_FAILURE_H_
#define CXL_OFFLOAD_OS_MEMORY_FAILURE_H_

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace cxl_offload::os {

// Called from the signal handler after a loss was written down; async-signal-safe.
using LossNotice = void (*)();

// From now on the process survives such failures, until `stop_surviving`. `prepare` runs after the
// earlier handler was noted and before ours is installed. If another handler has replaced ours
// since, calling this again installs ours again. Throws SystemError.
void survive_memory_failures(LossNotice notice, const std::function<void()>& prepare = {});
// Installs the handler that was there before again, after `prepare`. From now on a lost page ends
// the process.
void stop_surviving(const std::function<void()>& prepare = {});
// Whether our handler is the one that the kernel calls now.
bool survives_memory_failures();

// Asks which pages of a range that ought to be there are lost, replaces and writes them down as the
// handler does; works whether or not failures are survived. Pages that were swapped out come back.
// If a file or device is gone, all bytes from there on are written down and not replaced; using
// them nevertheless raises SIGBUS. Returns what was lost. `page_bytes` is the size of the pages
// with which the range was mapped.
std::vector<std::span<std::byte>> find_lost_pages(std::span<std::byte> range, size_t page_bytes);

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_MEMORY_FAILURE_H_
