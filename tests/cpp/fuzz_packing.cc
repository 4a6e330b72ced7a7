// What libFuzzer drives, and test_fuzz_packing.cc replays: packing of any numbers into codes and
// back, against the formula in double, and the conversions of half and 8-bit floats.
#include <cfenv>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/float8.h"
#include "fuzz_arrays.h"
#include "fuzz_input.h"
#include "transfer/packing.h"

namespace cxl_offload::transfer {
namespace {

using kernels::GuardedArray;
using kernels::number_at;

constexpr double kLargestE4m3 = 448;
constexpr double kHalfLimit = 65520;  // rounds to infinity in half precision

Dtype dtype_of(Element element) {
  if (element == Element::kFloat32) return Dtype::kFloat32;
  return element == Element::kFloat16 ? Dtype::kFloat16 : Dtype::kBfloat16;
}

// Half the distance of neighbours near a number of a type, rounding included.
double half_step(Dtype dtype, double number) {
  const double size = std::abs(number);
  if (dtype == Dtype::kFloat32) return size * 0x1p-24 + 0x1p-150;
  if (dtype == Dtype::kFloat16) return size * 0x1p-11 + 0x1p-25;
  return size * 0x1p-8 + 0x1p-134;
}

// What the numbers of one group must come back as, about.
class Group {
 public:
  Group(const Packing& packing, std::vector<double> numbers)
      : packing_(packing), numbers_(std::move(numbers)) {
    for (const double number : numbers_) {
      finite_ = finite_ && std::isfinite(number);
      if (!std::isfinite(number)) continue;
      least_ = std::min(least_, number);
      most_ = std::max(most_, number);
    }
  }

  void check(size_t i, double back, Dtype dtype) const {
    const bool int4 = packing_.code() == Code::kInt4;
    if (int4 && near_half_limit()) return;  // rounding decides
    if (int4 ? !fits_half() : !std::isfinite(numbers_[i])) {
      return require(std::isnan(back), "a fault was hidden: " + std::to_string(back));
    }
    if (std::isinf(back) || near_limit(dtype, numbers_[i])) return;
    const double off = (int4 ? int4_off() : fp8_off(numbers_[i])) + 4 * half_step(dtype, most());
    require(std::abs(back - numbers_[i]) <= off, std::to_string(numbers_[i]) + " came back as " +
                                                     std::to_string(back) + ", further than " +
                                                     std::to_string(off));
  }

 private:
  double most() const { return std::max(std::abs(least_), std::abs(most_)); }
  // Where rounding to half precision may or may not end in infinity.
  static bool near_limit(Dtype dtype, double number) {
    return dtype == Dtype::kFloat16 && std::abs(number) > 60000;
  }
  // The least number and the step, which are kept in half precision.
  bool fits_half() const {
    return finite_ && std::abs(least_) < kHalfLimit && (most_ - least_) / 15 < kHalfLimit;
  }
  bool near_half_limit() const {
    return finite_ && (std::abs(std::abs(least_) - kHalfLimit) < 100 ||
                       std::abs((most_ - least_) / 15 - kHalfLimit) < 100);
  }
  double int4_off() const {
    const double step = (most_ - least_) / 15;
    // Half a step; low, and 15 times the step, in half precision.
    return step * 0.51 + 2 * half_step(Dtype::kFloat16, most()) +
           16 * half_step(Dtype::kFloat16, step);
  }
  double fp8_off(double number) const {
    const double unit = most() / kLargestE4m3;
    return std::abs(number) * 0x1p-4 * 1.01 + unit * 0x1p-10 + 0x1p-140;
  }

  const Packing& packing_;
  const std::vector<double> numbers_;
  bool finite_ = true;
  double least_ = std::numeric_limits<double>::infinity();
  double most_ = -std::numeric_limits<double>::infinity();
};

void fuzz_round_trip(Input& input, kernels::Numbers& numbers) {
  const Element element =
      input.any_of<Element>({Element::kFloat16, Element::kBfloat16, Element::kFloat32});
  const Dtype dtype = dtype_of(element);
  const Packing packing(input.below(2) == 0 ? Code::kInt4 : Code::kFp8, element,
                        size_t{32} << input.below(4));
  const size_t count = input.one_in(4) ? input.byte() * 8 + input.byte() : input.below(100);
  GuardedArray source(dtype, count, input.below(40));
  const auto filling =
      input.any_of<kernels::Filling>({kernels::Filling::kUnit, kernels::Filling::kWide,
                                      kernels::Filling::kTiny, kernels::Filling::kAnyBits});
  source.fill(filling, input.one_in(4), numbers);
  GuardedArray packed(Dtype::kUint8, packing.packed_bytes(count), input.below(40));
  GuardedArray back(dtype, count, input.below(40));
  packing.pack(packed.data(), source.data(), count);
  packing.unpack(back.data(), packed.data(), count);
  require(packed.guard_is_whole() && back.guard_is_whole(), "bytes before an array were written");
  for (size_t first = 0; first < count; first += packing.group_elements()) {
    const size_t held = std::min(packing.group_elements(), count - first);
    std::vector<double> group(held);
    for (size_t i = 0; i < held; ++i) {
      group[i] = number_at(source.data(), dtype, static_cast<int64_t>(first + i));
    }
    const Group expected(packing, group);
    for (size_t i = 0; i < held; ++i) {
      expected.check(i, number_at(back.data(), dtype, static_cast<int64_t>(first + i)), dtype);
    }
  }
}

// Any bytes are packed numbers: nothing but the target is written.
void fuzz_unpack(Input& input, kernels::Numbers& numbers) {
  const Element element =
      input.any_of<Element>({Element::kFloat16, Element::kBfloat16, Element::kFloat32});
  const Packing packing(input.below(2) == 0 ? Code::kInt4 : Code::kFp8, element,
                        size_t{32} << input.below(4));
  const size_t count = input.byte() * 3;
  GuardedArray packed(Dtype::kUint8, packing.packed_bytes(count), input.below(40));
  packed.fill(kernels::Filling::kAnyBits, false, numbers);
  GuardedArray back(dtype_of(element), count, input.below(40));
  packing.unpack(back.data(), packed.data(), count);
  require(back.guard_is_whole(), "bytes before the numbers were written");
}

// A rounded number is the nearest; of two as near, the one with the even last bit.
template <class T>
void check_nearest(float value, T found) {
  const double number = value, rounded = to_float(found);
  if (std::isnan(value)) return require(std::isnan(rounded), "a NaN became a number");
  require(std::signbit(value) == (found.bits >> 15 != 0), "a sign was lost");
  if (std::isinf(rounded)) {  // as if the next exponent were a number
    const double largest = to_float(T{static_cast<uint16_t>(found.bits - 1)});
    const double before = to_float(T{static_cast<uint16_t>(found.bits - 2)});
    const double limit = largest + (largest - before) / 2;
    return require(std::abs(number) >= std::abs(limit), "a number became infinity");
  }
  for (const int step : {-1, 1}) {
    const T next{static_cast<uint16_t>(found.bits + step)};
    if ((next.bits ^ found.bits) & 0x8000 || !std::isfinite(to_float(next))) continue;
    const double off = std::abs(rounded - number), other = std::abs(to_float(next) - number);
    require(off < other || (off == other && found.bits % 2 == 0),
            std::to_string(value) + " was not rounded to the nearest");
  }
}

double e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const double size =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return bits & 0x80 ? -size : size;
}

double e5m2(uint8_t bits) {
  const int exponent = bits >> 2 & 31, fraction = bits & 3;
  double size = exponent == 0 ? std::ldexp(fraction, -16) : std::ldexp(4 + fraction, exponent - 17);
  if (exponent == 31) size = fraction == 0 ? HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  return bits & 0x80 ? -size : size;
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

void fuzz_conversions(Input& input, kernels::Numbers& numbers) {
  for (int i = 0; i < 64; ++i) {
    auto bits = static_cast<uint32_t>(i == 0 ? input.number() : numbers.next() >> 32);
    if (i % 4 == 1) bits &= 0xffffe000u;                        // ties of half precision
    if (i % 4 == 2) bits &= 0xffff8000u;                        // and of bfloat16
    if (i % 4 == 3) bits = (bits & 0x87ffffffu) + 0x30000000u;  // in the reach of half precision
    const float value = std::bit_cast<float>(bits);
    check_nearest(value, to_f16(value));
    check_nearest(value, to_bf16(value));
    const auto byte = static_cast<uint8_t>(bits >> 13);
    require(same(to_float(E4m3{byte}), e4m3(byte)), "E4M3 " + std::to_string(byte));
    require(same(to_float(E5m2{byte}), e5m2(byte)), "E5M2 " + std::to_string(byte));
  }
}

void fuzz_packing(Input& input) {
  const size_t kind = input.below(8);
  kernels::Numbers numbers(input.byte());
  if (kind < 5) return fuzz_round_trip(input, numbers);
  if (kind < 6) return fuzz_unpack(input, numbers);
  fuzz_conversions(input, numbers);
}

}  // namespace
}  // namespace cxl_offload::transfer

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  cxl_offload::Input input(data, size);
  cxl_offload::transfer::fuzz_packing(input);
  return 0;
}
