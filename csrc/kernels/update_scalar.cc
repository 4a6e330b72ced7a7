// The updates in plain C++, for every processor, and the oracle of the vector builds.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/half.h"
#include "kernels/update_pass.h"

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
  void store(float* at) const { *at = value; }
  void store(Bf16* at) const { *at = to_bf16(value); }
  void store(F16* at) const { *at = to_f16(value); }
  static void load_pair(const Bf16* at, Vector& even, Vector& odd) {
    even = load(at);
    odd = load(at + 1);
  }
  static void store_pair(Bf16* at, Vector even, Vector odd) {
    even.store(at);
    odd.store(at + 1);
  }
  template <class T>
  void stream(T* at) const {
    store(at);
  }
  static void wait_for_stores() {}
};

inline Vector add(Vector a, Vector b) { return {a.value + b.value}; }
inline Vector mul(Vector a, Vector b) { return {a.value * b.value}; }
inline Vector div(Vector a, Vector b) { return {a.value / b.value}; }
inline Vector fma(Vector a, Vector b, Vector c) { return {std::fma(a.value, b.value, c.value)}; }
inline Vector root(Vector a) { return {std::sqrt(a.value)}; }
// 1, -1, or the value itself when it is a zero or a NaN.
inline Vector sign(Vector a) { return {a.value > 0 ? 1.0f : a.value < 0 ? -1.0f : a.value}; }

#define CXL_OFFLOAD_PREFETCH_ELEMENTS 0
#include "kernels/update_loop.inc.h"

}  // namespace

UpdatePass update_pass_scalar(const PassKey& key) { return find_pass(key); }

}  // namespace cxl_offload
