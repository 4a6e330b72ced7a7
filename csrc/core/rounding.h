// Adds up and multiplies sizes that users name, without overflow.
#ifndef CXL_OFFLOAD_CORE_ROUNDING_H_
#define CXL_OFFLOAD_CORE_ROUNDING_H_

#include <cstddef>
#include <optional>

namespace cxl_offload {

// This is more bytes than any address space has. A smaller number may be rounded up or doubled
// safely.
inline constexpr size_t kMostBytes = size_t{1} << 62;

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Returns nothing where the result does not fit.
constexpr std::optional<size_t> checked_product(size_t a, size_t b) {
  size_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::nullopt : std::optional(result);
}

constexpr std::optional<size_t> checked_sum(size_t a, size_t b) {
  size_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? std::nullopt : std::optional(result);
}

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_ROUNDING_H_
