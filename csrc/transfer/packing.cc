#include "transfer/packing.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "core/error.h"
#include "core/half.h"

namespace cxl_offload::transfer {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargestFp8 = 448.0F;
constexpr uint8_t kNanFp8 = 0x7f;
constexpr float kMostInt4 = 15.0F;
constexpr size_t kScaleBytes = 4;
constexpr size_t kMostElements = 256;

// Numbers in host memory, which need not be aligned.
template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

template <typename T>
T from_float(float value) {
  return value;
}
template <>
F16 from_float(float value) {
  return to_f16(value);
}
// The NaN has the bits that the GPU gives it.
template <>
Bf16 from_float(float value) {
  return std::isnan(value) ? Bf16{0x7fff} : to_bf16(value);
}

// E4M3 without infinity: 4 bits of exponent with bias 7, 3 of mantissa.
uint8_t to_fp8(float value) {
  if (!std::isfinite(value)) return kNanFp8;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float size = std::min(std::abs(value), kLargestFp8);
  int exponent = 0;
  std::frexp(size, &exponent);  // size = m * 2^exponent, 0.5 <= m < 1
  const int unit = std::max(exponent - 4, -9);
  // The current rounding mode is to nearest even.
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, -unit)));
  if (steps == 0) return sign;
  if (steps < 8) return sign | static_cast<uint8_t>(steps);  // subnormal
  const bool carried = steps == 16;
  const int biased = unit + 10 + (carried ? 1 : 0);
  const auto bits = static_cast<uint8_t>(biased << 3 | (carried ? 0 : steps - 8));
  return sign | std::min<uint8_t>(bits, 0x7e);
}

float from_fp8(uint8_t code) {
  const int biased = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == kNanFp8) return kNan;
  const float size = biased == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                 : std::ldexp(static_cast<float>(8 + mantissa), biased - 10);
  return (code & 0x80) != 0 ? -size : size;
}

using Values = std::span<const float>;

void pack_int4(Values values, std::byte* codes, std::byte* scale) {
  bool fits = true;
  float least = std::numeric_limits<float>::infinity(), most = -least;
  for (const float value : values) {
    fits = fits && std::isfinite(value);
    least = std::min(least, value);
    most = std::max(most, value);
  }
  F16 low = to_f16(least);
  F16 step = to_f16((most - to_float(low)) / kMostInt4);
  fits = fits && std::isfinite(to_float(low)) && std::isfinite(to_float(step));
  if (!fits) {
    low = to_f16(kNan);
    step = F16{0};
  }
  store(scale, low);
  store(scale + sizeof(low), step);
  if (!fits || to_float(step) == 0) return;
  for (size_t i = 0; i < values.size(); ++i) {
    const float steps = std::nearbyint((values[i] - to_float(low)) / to_float(step));
    const auto code = static_cast<uint8_t>(std::clamp(steps, 0.0F, kMostInt4));
    codes[i / 2] |= std::byte(i % 2 == 0 ? code << 4 : code);
  }
}

void pack_fp8(Values values, std::byte* codes, std::byte* scale) {
  float most = 0;
  for (const float value : values) {
    if (std::isfinite(value)) most = std::max(most, std::abs(value));
  }
  float unit = most / kLargestFp8;
  if (unit == 0) unit = 1;
  store(scale, unit);
  for (size_t i = 0; i < values.size(); ++i) codes[i] = std::byte(to_fp8(values[i] / unit));
}

template <typename T>
void pack_groups(const Packing& packing, std::byte* target, const std::byte* source, size_t count) {
  const size_t group = packing.group_elements();
  const size_t codes_each = packing.code_bytes(group);
  std::byte* scale = target + packing.code_bytes(count);
  std::memset(target, 0, packing.code_bytes(count));
  float values[kMostElements];
  for (size_t first = 0; first < count; first += group) {
    const size_t held = std::min(group, count - first);
    for (size_t i = 0; i < held; ++i) {
      values[i] = to_float(load<T>(source + (first + i) * sizeof(T)));
    }
    const auto pack = packing.code() == Code::kInt4 ? pack_int4 : pack_fp8;
    pack({values, held}, target, scale);
    target += codes_each;
    scale += kScaleBytes;
  }
}

// The fused multiply-add is that of the GPU, so that both round once.
float unpack_int4(const std::byte* codes, const std::byte* scale, size_t i) {
  const auto both = std::to_integer<unsigned>(codes[i / 2]);
  const auto code = static_cast<float>(i % 2 == 0 ? both >> 4 : both & 15);
  const float low = to_float(load<F16>(scale));
  const float step = to_float(load<F16>(scale + sizeof(F16)));
  return std::fma(code, step, low);
}

float unpack_fp8(const std::byte* codes, const std::byte* scale, size_t i) {
  return from_fp8(std::to_integer<uint8_t>(codes[i])) * load<float>(scale);
}

template <typename T>
void unpack_groups(const Packing& packing, std::byte* target, const std::byte* source,
                   size_t count) {
  const size_t group = packing.group_elements();
  const size_t codes_each = packing.code_bytes(group);
  const std::byte* const scales = source + packing.code_bytes(count);
  const auto unpack = packing.code() == Code::kInt4 ? unpack_int4 : unpack_fp8;
  for (size_t i = 0; i < count; ++i) {
    const size_t of = i / group;
    const float value = unpack(source + of * codes_each, scales + of * kScaleBytes, i % group);
    store(target + i * sizeof(T), from_float<T>(value));
  }
}

}  // namespace

size_t element_bytes(Element element) { return element == Element::kFloat32 ? 4 : 2; }

Packing::Packing(Code code, Element element, size_t group_elements)
    : code_(code), element_(element), group_elements_(group_elements) {
  if (!std::has_single_bit(group_elements) || group_elements < 32 ||
      group_elements > kMostElements) {
    throw InvalidArgument("pack in groups of " + std::to_string(group_elements) +
                          ": a group has 32, 64, 128 or 256 elements");
  }
}

size_t Packing::groups(size_t count) const {
  return count / group_elements_ + (count % group_elements_ > 0 ? 1 : 0);
}

size_t Packing::code_bytes(size_t count) const {
  return groups(count) * group_elements_ / (code_ == Code::kInt4 ? 2 : 1);
}

size_t Packing::packed_bytes(size_t count) const {
  return code_bytes(count) + groups(count) * kScaleBytes;
}

void Packing::pack(std::byte* target, const std::byte* source, size_t count) const {
  switch (element_) {
    case Element::kFloat16:
      return pack_groups<F16>(*this, target, source, count);
    case Element::kBfloat16:
      return pack_groups<Bf16>(*this, target, source, count);
    case Element::kFloat32:
      return pack_groups<float>(*this, target, source, count);
  }
}

void Packing::unpack(std::byte* target, const std::byte* source, size_t count) const {
  switch (element_) {
    case Element::kFloat16:
      return unpack_groups<F16>(*this, target, source, count);
    case Element::kBfloat16:
      return unpack_groups<Bf16>(*this, target, source, count);
    case Element::kFloat32:
      return unpack_groups<float>(*this, target, source, count);
  }
}

}  // namespace cxl_offload::transfer
