// Writes lines from the caches of processors back to memory that keeps its contents without power.
#ifndef CXL_OFFLOAD_OS_CACHE_LINES_H_
#define CXL_OFFLOAD_OS_CACHE_LINES_H_

#include <cstddef>
#include <span>

namespace cxl_offload::os {

// Writes every line of the range back to memory. When it returns, all lines are on their way to
// where they survive a power cut, and whatever is written later arrives later. Lines need not be
// dirty.
void write_back_lines(std::span<const std::byte> range) noexcept;

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_CACHE_LINES_H_
