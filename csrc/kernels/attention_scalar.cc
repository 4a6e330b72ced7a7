// Decode attention in plain C++.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/float8.h"
#include "core/half.h"
#include "kernels/attention_pass.h"

namespace cxl_offload {
namespace {

struct Vector {
  static constexpr size_t kLanes = 1;
  float value;

  static Vector all(float value) { return {value}; }
  template <class T>
  static Vector load(const T* at) {
    return {to_float(*at)};
  }
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

#include "kernels/attention_loop.inc.h"

}  // namespace

AttentionPass attention_pass_scalar(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload
