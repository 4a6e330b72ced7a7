// From the caches of processors to memory, where memory outlives the power or the machine.
#ifndef CXL_OFFLOAD_OS_CACHE_LINES_H_
#define CXL_OFFLOAD_OS_CACHE_LINES_H_

#include <cstddef>
#include <span>

namespace cxl_offload::os {

// Writes every line of the range back to memory, and returns when all are on their way to where
// the power cannot take them: what is written after it arrives after it. No line has to be dirty.
void write_back_lines(std::span<const std::byte> range) noexcept;

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_CACHE_LINES_H_
