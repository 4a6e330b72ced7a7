// Sizes in whole units.
#ifndef CXL_OFFLOAD_CORE_ROUNDING_H_
#define CXL_OFFLOAD_CORE_ROUNDING_H_

#include <cstddef>

namespace cxl_offload {

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_ROUNDING_H_
