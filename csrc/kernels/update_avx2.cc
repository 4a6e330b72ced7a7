// The updates with AVX2, FMA and F16C: eight elements an instruction.
#include "kernels/update_pass.h"

#if CXL_OFFLOAD_X86

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "core/half.h"

// After the headers: what they define must stay fit for every processor.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace cxl_offload {
namespace {

#define CXL_OFFLOAD_VECTOR inline __attribute__((always_inline))

struct Vector {
  static constexpr size_t kLanes = 8;
  __m256 value;

  CXL_OFFLOAD_VECTOR static Vector all(float value) { return {_mm256_set1_ps(value)}; }
  CXL_OFFLOAD_VECTOR static Vector load(const float* at) { return {_mm256_loadu_ps(at)}; }
  CXL_OFFLOAD_VECTOR static Vector load(const Bf16* at) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const F16* at) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at))};
  }

  CXL_OFFLOAD_VECTOR void store(float* at) const { _mm256_storeu_ps(at, value); }
  CXL_OFFLOAD_VECTOR void store(Bf16* at) const { _mm_storeu_si128((__m128i*)at, bf16()); }
  CXL_OFFLOAD_VECTOR void store(F16* at) const { _mm_storeu_si128((__m128i*)at, f16()); }
  CXL_OFFLOAD_VECTOR void stream(Bf16* at) const { _mm_stream_si128((__m128i*)at, bf16()); }
  CXL_OFFLOAD_VECTOR void stream(F16* at) const { _mm_stream_si128((__m128i*)at, f16()); }
  CXL_OFFLOAD_VECTOR static void wait_for_stores() { _mm_sfence(); }

  // Neighbours apart: the even elements and the odd ones, which costs no shuffle.
  CXL_OFFLOAD_VECTOR static void load_pair(const Bf16* at, Vector& even, Vector& odd) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)at);
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(both, high_halves()))};
  }
  CXL_OFFLOAD_VECTOR static void store_pair(Bf16* at, Vector even, Vector odd) {
    const __m256i low = _mm256_srli_epi32(even.rounded(), 16);
    _mm256_storeu_si256((__m256i*)at, _mm256_blend_epi16(low, odd.rounded(), 0xaa));
  }

  CXL_OFFLOAD_VECTOR static __m256i high_halves() {
    return _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  }
  // The high halves are the bfloat16 nearest, ties to even; a NaN stays one, made quiet.
  CXL_OFFLOAD_VECTOR __m256i rounded() const {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i near = _mm256_add_epi32(bits, half);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(near, quiet, nan);
  }
  CXL_OFFLOAD_VECTOR __m128i bf16() const {
    const __m256i words = _mm256_srli_epi32(rounded(), 16);
    const __m256i packed = _mm256_packus_epi32(words, words);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8));
  }
  CXL_OFFLOAD_VECTOR __m128i f16() const {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  }
};

CXL_OFFLOAD_VECTOR Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector mul(Vector a, Vector b) { return {_mm256_mul_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector div(Vector a, Vector b) { return {_mm256_div_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector fma(Vector a, Vector b, Vector c) {
  return {_mm256_fmadd_ps(a.value, b.value, c.value)};
}
CXL_OFFLOAD_VECTOR Vector root(Vector a) { return {_mm256_sqrt_ps(a.value)}; }
// 1, -1, or the value itself when it is a zero or a NaN.
CXL_OFFLOAD_VECTOR Vector sign(Vector a) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 signed_one =
      _mm256_or_ps(_mm256_and_ps(a.value, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
  return {_mm256_blendv_ps(a.value, signed_one, _mm256_cmp_ps(a.value, zero, _CMP_NEQ_OQ))};
}

#undef CXL_OFFLOAD_VECTOR

#define CXL_OFFLOAD_PREFETCH_ELEMENTS 1024
#include "kernels/update_loop.inc.h"

}  // namespace

UpdatePass update_pass_avx2(const PassKey& key) { return find_pass(key); }

}  // namespace cxl_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace cxl_offload {

UpdatePass update_pass_avx2(const PassKey&) { return nullptr; }

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_X86
