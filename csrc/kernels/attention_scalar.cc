// Decode attention in plain C++.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/float8.h"
#include "core/half.h"
#include "kernels/attention_pass.h"

namespace cxl_offload {
namespace {

struct Vector {
  static constexpr size_t kLanes = 1;
  template <class T>
  using NoNan = T;
  float value;

  static Vector all(float value) { return {value}; }
  template <class T>
  static Vector load(const T* at) {
    return {to_float(*at)};
  }
  static Vector load(const E4m3* at) { return {to_float(*at) / kE4m3Unit}; }
  template <class T>
  static Vector load_some(const T* at, size_t) {
    return load(at);
  }
  void store(float* at) const { *at = value; }
  float total() const { return value; }
  static void totals(const Vector* four, float* to) {
    for (size_t i = 0; i < 4; ++i) to[i] = four[i].value;
  }
  float greatest() const { return value; }
};

inline Vector add(Vector a, Vector b) { return {a.value + b.value}; }
inline Vector mul(Vector a, Vector b) { return {a.value * b.value}; }
inline Vector fma(Vector a, Vector b, Vector c) { return {a.value * b.value + c.value}; }
// The second when either is a NaN.
inline Vector larger(Vector a, Vector b) { return {a.value > b.value ? a.value : b.value}; }
inline Vector exponential(Vector a) { return {std::exp(a.value)}; }

// Of a pair of scales the step, then the low; see AttentionState.
inline Vector load_scales(const F16* halves, size_t left, bool inverse) {
  const bool second = left % 2 == 1;
  if (!inverse) return Vector::load(second ? halves - 1 : halves + 1);
  return {second ? to_float(*halves) : 1 / to_float(*halves)};
}

// Two bytes of 4-bit codes.
inline uint16_t load_words(const std::byte* at) {
  uint16_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

// What the codes of a group are worth.
struct Table {
  Table(float step, float low) : step(step), low(low) {}
  template <int kShift>
  Vector number(uint16_t word) const {
    return {static_cast<float>(word >> kShift & 15) * step + low};
  }

  float step;
  float low;
};

// One after the other.
#include "kernels/attention_loop.inc.h"
//
#include "kernels/attention_codes.inc.h"

}  // namespace

AttentionPass attention_pass_scalar(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload
