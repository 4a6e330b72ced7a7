// The two 8-bit floating-point formats of caches, and their exact conversion to float.
//
// Both are shifted into half precision, which processors can convert. E5M2 is the upper byte of
// half precision. The bias of E4M3 is less by 8, so the shifted number is 256 times too small.
#ifndef CXL_OFFLOAD_CORE_FLOAT8_H_
#define CXL_OFFLOAD_CORE_FLOAT8_H_

#include <cstdint>

#include "core/half.h"

namespace cxl_offload {

// torch.float8_e4m3fn: 4 bits of exponent, no infinity, one NaN of each sign, up to 448.
struct E4m3 {
  uint8_t bits;
};

// torch.float8_e5m2: 5 bits of exponent, infinity and NaN as in half precision.
struct E5m2 {
  uint8_t bits;
};

// Shifting makes numbers of E4M3 too small by this factor. Kernels multiply by it at the end.
inline constexpr float kE4m3Unit = 256;

constexpr float to_float(E4m3 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80u) << 8;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fu) << 7;
  // Only the NaN carries into bit 14, which makes an exponent of all ones.
  const uint32_t nan = (magnitude + 0x80u) & 0x4000u;
  return to_float(F16{static_cast<uint16_t>(sign | magnitude | nan)}) * kE4m3Unit;
}

constexpr float to_float(E5m2 value) {
  return to_float(F16{static_cast<uint16_t>(static_cast<uint32_t>(value.bits) << 8)});
}

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_FLOAT8_H_
