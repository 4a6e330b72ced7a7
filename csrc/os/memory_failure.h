// Memory that breaks: SIGBUS for a lost page of a watched range (os/watched_ranges.h) ends nothing.
//
// The lost pages are replaced by fresh ones full of 0xff, which is NaN in every float type, the
// loss is written down (os/lost_ranges.h), and the access goes on. What else gets SIGBUS is left to
// the handler that was there before.
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
// handler to chain to was noted and before ours goes in. Calling it again puts ours in place of one
// that has replaced it since. Throws SystemError.
void survive_memory_failures(LossNotice notice, const std::function<void()>& prepare = {});
// The handler that was there before is back, after `prepare`; what is lost from now on ends the
// process.
void stop_surviving(const std::function<void()>& prepare = {});
// Whether our handler is the one that the kernel calls now.
bool survives_memory_failures();

// Asks which pages of a range that ought to be there are lost, replaces and writes them down as the
// handler does; works whether or not failures are survived. Pages that were swapped out come back.
// Of a file or device that is gone, all from there on is written down, and not replaced: who uses
// it nevertheless gets SIGBUS. Returns what was lost. `page_bytes` is what the range was mapped in.
std::vector<std::span<std::byte>> find_lost_pages(std::span<std::byte> range, size_t page_bytes);

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_MEMORY_FAILURE_H_
