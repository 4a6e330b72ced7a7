// The two 16-bit floating-point formats, and their conversions in plain integer arithmetic. They
// round to nearest, with ties to even. They keep subnormal numbers, and a NaN stays a NaN and
// becomes quiet.
//
// The instructions of AVX512-BF16 turn subnormal numbers into zero. Conversions do not use them, so
// that a result does not depend on the processor. Only linear layers use their products, and say
// so.
#ifndef CXL_OFFLOAD_CORE_HALF_H_
#define CXL_OFFLOAD_CORE_HALF_H_

#include <bit>
#include <cstdint>

namespace cxl_offload {

struct Bf16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

constexpr float to_float(float value) { return value; }

constexpr float to_float(Bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

constexpr float to_float(F16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t fraction = value.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in float
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  if (exponent == 0x1fu) {
    const uint32_t quiet = fraction == 0 ? 0 : 0x400000u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (fraction << 13));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

constexpr Bf16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

constexpr F16 to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    const uint32_t payload = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    return {static_cast<uint16_t>(sign | payload)};
  }
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // to infinity
  if (magnitude < 0x38800000u) {
    // Subnormal: the sum with 0.5 leaves the fraction, rounded by the hardware, in the low bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    const uint32_t fraction = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f);
    return {static_cast<uint16_t>(sign | fraction)};
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13))};
}

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_HALF_H_
