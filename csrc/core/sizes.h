// Sizes of the hardware that the whole core shares. Python reads them in cxl_offload/core.py.
#ifndef CXL_OFFLOAD_CORE_SIZES_H_
#define CXL_OFFLOAD_CORE_SIZES_H_

#include <cstddef>

namespace cxl_offload {

// One cache line, the unit in which cores ask memory, on x86-64 and on Arm's server cores. What
// writes lines back asks an Arm processor for its own size instead (os/cache_lines.h).
inline constexpr size_t kLineBytes = 64;

// The smallest page of x86-64, and the smallest that Linux has on Arm. Hardware prefetchers stop at
// its end. A running kernel may have larger ones: os::Kernel::page_bytes() says which.
inline constexpr size_t kBasePageBytes = 4096;

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_SIZES_H_
