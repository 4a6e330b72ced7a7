// Decode attention with AVX-512 (F, BW, DQ and VL).
#include "core/cpu_features.h"
#include "kernels/attention_pass.h"

#if CXL_OFFLOAD_X86

#include <immintrin.h>

#include <algorithm>
#include <bit>
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace cxl_offload {
namespace {

#define CXL_OFFLOAD_VECTOR inline __attribute__((always_inline))

// A code of rows that have no NaN: only the greatest magnitude is one.
struct E4m3NoNan {
  uint8_t bits;

  CXL_OFFLOAD_VECTOR static bool any_nan(const E4m3* const* rows, size_t count, size_t dim) {
    const __m512i sign = _mm512_set1_epi8(-128);
    __m512i most = sign;  // of the codes as unsigned, all of them with the sign
    for (size_t i = 0; i < count; ++i) {
      size_t at = 0;
      for (; at + 64 <= dim; at += 64) {
        most = _mm512_max_epu8(most, _mm512_or_si512(_mm512_loadu_si512(rows[i] + at), sign));
      }
      if (at == dim) continue;
      const __m512i last = _mm512_maskz_loadu_epi8((uint64_t{1} << (dim - at)) - 1, rows[i] + at);
      most = _mm512_max_epu8(most, _mm512_or_si512(last, sign));
    }
    return _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8(-1)) != 0;
  }
};

struct Vector {
  static constexpr size_t kLanes = 16;
  template <class T>
  using NoNan = std::conditional_t<std::is_same_v<T, E4m3>, E4m3NoNan, T>;
  __m512 value;

  CXL_OFFLOAD_VECTOR static Vector all(float value) { return {_mm512_set1_ps(value)}; }
  CXL_OFFLOAD_VECTOR static Vector load(const float* at) { return {_mm512_loadu_ps(at)}; }
  CXL_OFFLOAD_VECTOR static Vector load(const Bf16* at) {
    return wide_bf16(_mm256_loadu_si256((const __m256i*)at));
  }
  CXL_OFFLOAD_VECTOR static Vector load(const F16* at) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at))};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const E4m3* at) {
    return wide(at, _mm_loadu_si128((const __m128i*)at));
  }
  CXL_OFFLOAD_VECTOR static Vector load(const E4m3NoNan* at) {
    return wide(at, _mm_loadu_si128((const __m128i*)at));
  }
  CXL_OFFLOAD_VECTOR static Vector load(const E5m2* at) {
    return wide(at, _mm_loadu_si128((const __m128i*)at));
  }
  // Zeros beyond `count` elements, whose memory is not read.
  CXL_OFFLOAD_VECTOR static Vector load_some(const float* at, size_t count) {
    return {_mm512_maskz_loadu_ps(first(count), at)};
  }
  CXL_OFFLOAD_VECTOR static Vector load_some(const Bf16* at, size_t count) {
    return wide_bf16(_mm256_maskz_loadu_epi16(first(count), at));
  }
  CXL_OFFLOAD_VECTOR static Vector load_some(const F16* at, size_t count) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), at))};
  }
  template <class T>
  CXL_OFFLOAD_VECTOR static Vector load_some(const T* at, size_t count) {
    return wide(at, _mm_maskz_loadu_epi8(first(count), at));
  }
  CXL_OFFLOAD_VECTOR void store(float* at) const { _mm512_storeu_ps(at, value); }
  CXL_OFFLOAD_VECTOR float total() const { return _mm512_reduce_add_ps(value); }
  CXL_OFFLOAD_VECTOR float greatest() const { return _mm512_reduce_max_ps(value); }
  // The totals of four vectors, with fewer steps than one by one.
  CXL_OFFLOAD_VECTOR static void totals(const Vector* four, float* to) {
    const __m256 low = _mm256_hadd_ps(four[0].half(), four[1].half());
    const __m256 high = _mm256_hadd_ps(four[2].half(), four[3].half());
    const __m256 all = _mm256_hadd_ps(low, high);
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    _mm_storeu_ps(to, sums);
  }
  CXL_OFFLOAD_VECTOR __m256 half() const {
    return _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
  }

  CXL_OFFLOAD_VECTOR static __mmask16 first(size_t count) {
    return static_cast<__mmask16>((1u << count) - 1);
  }
  // As to_float() does it, but for the last factor. Widened with its sign, a number has it in bit
  // 15 when shifted.
  CXL_OFFLOAD_VECTOR static Vector wide(const E4m3*, __m128i bits) {
    const __m256i small = without_nan(bits);
    const __m256i carried = _mm256_add_epi16(small, _mm256_set1_epi16(0x80));
    const __m256i nan = _mm256_and_si256(carried, _mm256_set1_epi16(0x4000));
    return {_mm512_cvtph_ps(_mm256_or_si256(small, nan))};
  }
  CXL_OFFLOAD_VECTOR static Vector wide(const E4m3NoNan*, __m128i bits) {
    return {_mm512_cvtph_ps(without_nan(bits))};
  }
  CXL_OFFLOAD_VECTOR static __m256i without_nan(__m128i bits) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bits), 7);
    return _mm256_and_si256(shifted, _mm256_set1_epi16(-0x4080));
  }
  CXL_OFFLOAD_VECTOR static Vector wide(const E5m2*, __m128i bits) {
    return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bits), 8))};
  }
  CXL_OFFLOAD_VECTOR static Vector wide_bf16(__m256i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
};

CXL_OFFLOAD_VECTOR Vector add(Vector a, Vector b) { return {_mm512_add_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector mul(Vector a, Vector b) { return {_mm512_mul_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector fma(Vector a, Vector b, Vector c) {
  return {_mm512_fmadd_ps(a.value, b.value, c.value)};
}

// The second when either is a NaN.
CXL_OFFLOAD_VECTOR Vector larger(Vector a, Vector b) { return {_mm512_max_ps(a.value, b.value)}; }

// Of numbers up to zero; below the normal numbers zero; a NaN stays one (the second operand of the
// maximum is what comes out of it then).
CXL_OFFLOAD_VECTOR Vector exponential(Vector a) {
  const __m512 least = _mm512_set1_ps(-87.3f);
  const __m512 x = _mm512_max_ps(least, a.value);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // The logarithm of 2 in two parts, so that the rest is exact.
  __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.0f / 5040);  // Taylor's series: the rest is at most 0.35
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term));
  }
  const __mmask16 tiny = _mm512_cmp_ps_mask(a.value, least, _CMP_LT_OQ);
  return {_mm512_mask_mov_ps(_mm512_scalef_ps(sum, n), tiny, _mm512_setzero_ps())};
}

// A step of Newton's method is shorter than a division, but makes NaN of zero and infinity.
CXL_OFFLOAD_VECTOR __m512 inverse_of(__m512 numbers) {
  const __m512 rough = _mm512_rcp14_ps(numbers);
  const __m512 off = _mm512_fnmadd_ps(rough, numbers, _mm512_set1_ps(1));
  const __mmask16 odd = _mm512_cmp_ps_mask(off, off, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(_mm512_fmadd_ps(rough, off, rough), odd, rough);
}

// Of each pair of scales the step, then the low; see AttentionState.
CXL_OFFLOAD_VECTOR Vector load_scales(const F16* halves, size_t left, bool inverse) {
  const bool whole = left >= Vector::kLanes;
  const __m512 scales = (whole ? Vector::load(halves) : Vector::load_some(halves, left)).value;
  if (!inverse) return {_mm512_permute_ps(scales, 0xb1)};
  return {_mm512_mask_mov_ps(scales, 0x5555, inverse_of(scales))};
}

// Two bytes of 4-bit codes a lane.
CXL_OFFLOAD_VECTOR __m512i load_words(const std::byte* at) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
}

// What the 16 codes of a group are worth. A look-up takes the lowest four bits of its index.
struct Table {
  CXL_OFFLOAD_VECTOR Table(float step, float low) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    numbers = _mm512_fmadd_ps(codes, _mm512_set1_ps(step), _mm512_set1_ps(low));
  }
  template <int kShift>
  CXL_OFFLOAD_VECTOR Vector number(__m512i words) const {
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(words, kShift), numbers)};
  }

  __m512 numbers;
};

// One after the other.
#include "kernels/attention_loop.inc.h"
//
#include "kernels/attention_codes.inc.h"

}  // namespace

AttentionPass attention_pass_avx512(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload

#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx512vnni")
#endif

namespace cxl_offload {
namespace {

#include "kernels/attention_integers.inc.h"

#undef CXL_OFFLOAD_VECTOR

}  // namespace

AttentionPass attention_pass_integers(size_t groups) {
  if (!__builtin_cpu_supports("avx512vnni")) return nullptr;
  return groups == 1 ? attend_integers<1> : attend_integers<2>;
}

}  // namespace cxl_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace cxl_offload {

AttentionPass attention_pass_avx512(Dtype) { return nullptr; }
AttentionPass attention_pass_integers(size_t) { return nullptr; }

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_X86
