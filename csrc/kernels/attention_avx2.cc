// Decode attention with AVX2, FMA and F16C.
#include "core/cpu_features.h"
#include "kernels/attention_pass.h"

#if CXL_OFFLOAD_X86

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/float8.h"
#include "core/half.h"

// GCC 12 takes the placeholder operands of its own intrinsics for uninitialised (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

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
  template <class T>
  using NoNan = T;
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
  CXL_OFFLOAD_VECTOR static Vector load(const E4m3* at) {
    // As to_float() does it, but for the last factor. Widened with its sign, a number has it in bit
    // 15 when shifted.
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)at));
    const __m128i small = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(-0x4080));
    const __m128i carried = _mm_add_epi16(small, _mm_set1_epi16(0x80));
    const __m128i nan = _mm_and_si128(carried, _mm_set1_epi16(0x4000));
    return {_mm256_cvtph_ps(_mm_or_si128(small, nan))};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const E5m2* at) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)at));
    return {_mm256_cvtph_ps(_mm_slli_epi16(wide, 8))};
  }
  // Zeros beyond `count` elements, whose memory is not read.
  template <class T>
  CXL_OFFLOAD_VECTOR static Vector load_some(const T* at, size_t count) {
    T some[kLanes] = {};
    std::memcpy(some, at, count * sizeof(T));
    return load(some);
  }
  CXL_OFFLOAD_VECTOR void store(float* at) const { _mm256_storeu_ps(at, value); }
  CXL_OFFLOAD_VECTOR float total() const {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  }
  CXL_OFFLOAD_VECTOR float greatest() const {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
  }
  // The totals of four vectors, with fewer steps than one by one.
  CXL_OFFLOAD_VECTOR static void totals(const Vector* four, float* to) {
    const __m256 low = _mm256_hadd_ps(four[0].value, four[1].value);
    const __m256 high = _mm256_hadd_ps(four[2].value, four[3].value);
    const __m256 all = _mm256_hadd_ps(low, high);
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    _mm_storeu_ps(to, sums);
  }
};

CXL_OFFLOAD_VECTOR Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector mul(Vector a, Vector b) { return {_mm256_mul_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector fma(Vector a, Vector b, Vector c) {
  return {_mm256_fmadd_ps(a.value, b.value, c.value)};
}

// The second when either is a NaN.
CXL_OFFLOAD_VECTOR Vector larger(Vector a, Vector b) { return {_mm256_max_ps(a.value, b.value)}; }

// Of numbers up to zero; below the normal numbers zero; a NaN stays one (the second operand of the
// maximum is what comes out of it then).
CXL_OFFLOAD_VECTOR Vector exponential(Vector a) {
  const __m256 least = _mm256_set1_ps(-87.3f);
  const __m256 x = _mm256_max_ps(least, a.value);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // The logarithm of 2 in two parts, so that the rest is exact.
  __m256 rest = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  rest = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), rest);
  __m256 sum = _mm256_set1_ps(1.0f / 5040);  // Taylor's series: the rest is at most 0.35
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(term));
  }
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  const __m256 tiny = _mm256_cmp_ps(a.value, least, _CMP_LT_OQ);
  return {_mm256_andnot_ps(tiny, _mm256_mul_ps(sum, power))};
}

// Of each pair of scales the step, then the low; see AttentionState.
CXL_OFFLOAD_VECTOR Vector load_scales(const F16* halves, size_t left, bool inverse) {
  const bool whole = left >= Vector::kLanes;
  const __m256 scales = (whole ? Vector::load(halves) : Vector::load_some(halves, left)).value;
  if (!inverse) return {_mm256_permute_ps(scales, 0xb1)};
  return {_mm256_blend_ps(_mm256_div_ps(_mm256_set1_ps(1), scales), scales, 0xaa)};
}

// Two bytes of 4-bit codes a lane.
CXL_OFFLOAD_VECTOR __m256i load_words(const std::byte* at) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
}

// What the codes of a group are worth.
struct Table {
  CXL_OFFLOAD_VECTOR Table(float step, float low)
      : step(_mm256_set1_ps(step)), low(_mm256_set1_ps(low)) {}
  template <int kShift>
  CXL_OFFLOAD_VECTOR Vector number(__m256i words) const {
    const __m256i code = _mm256_and_si256(_mm256_srli_epi32(words, kShift), _mm256_set1_epi32(15));
    return {_mm256_fmadd_ps(_mm256_cvtepi32_ps(code), step, low)};
  }

  __m256 step;
  __m256 low;
};

#undef CXL_OFFLOAD_VECTOR

// One after the other.
#include "kernels/attention_loop.inc.h"
//
#include "kernels/attention_codes.inc.h"

}  // namespace

AttentionPass attention_pass_avx2(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace cxl_offload {

AttentionPass attention_pass_avx2(Dtype) { return nullptr; }

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_X86
