// The updates with AVX-512 (F, BW, DQ and VL): sixteen elements an instruction.
#include "kernels/update_pass.h"

#if CXL_OFFLOAD_X86

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "core/half.h"

// GCC 12 takes the placeholder operands of its own intrinsics for uninitialised (GCC bug 105593),
// where they are inlined, which is all over this file.
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

struct Vector {
  static constexpr size_t kLanes = 16;
  __m512 value;

  CXL_OFFLOAD_VECTOR static Vector all(float value) { return {_mm512_set1_ps(value)}; }
  CXL_OFFLOAD_VECTOR static Vector load(const float* at) { return {_mm512_loadu_ps(at)}; }
  CXL_OFFLOAD_VECTOR static Vector load(const Bf16* at) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const F16* at) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at))};
  }

  CXL_OFFLOAD_VECTOR void store(float* at) const { _mm512_storeu_ps(at, value); }
  CXL_OFFLOAD_VECTOR void store(Bf16* at) const { _mm256_storeu_si256((__m256i*)at, bf16()); }
  CXL_OFFLOAD_VECTOR void store(F16* at) const { _mm256_storeu_si256((__m256i*)at, f16()); }
  CXL_OFFLOAD_VECTOR void stream(Bf16* at) const { _mm256_stream_si256((__m256i*)at, bf16()); }
  CXL_OFFLOAD_VECTOR void stream(F16* at) const { _mm256_stream_si256((__m256i*)at, f16()); }
  CXL_OFFLOAD_VECTOR static void wait_for_stores() { _mm_sfence(); }

  // Neighbours apart: the even elements and the odd ones, which costs no shuffle.
  CXL_OFFLOAD_VECTOR static void load_pair(const Bf16* at, Vector& even, Vector& odd) {
    const __m512i both = _mm512_loadu_si512(at);
    even = {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))};
    odd = {_mm512_castsi512_ps(_mm512_and_si512(both, high_halves()))};
  }
  CXL_OFFLOAD_VECTOR static void store_pair(Bf16* at, Vector even, Vector odd) {
    const __m512i low = _mm512_srli_epi32(even.rounded(), 16);
    // low | (odd & high_halves)
    _mm512_storeu_si512(at, _mm512_ternarylogic_epi32(low, odd.rounded(), high_halves(), 0xf8));
  }

  CXL_OFFLOAD_VECTOR static __m512i high_halves() {
    return _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  }
  // The high halves are the bfloat16 nearest, ties to even; a NaN stays one, made quiet.
  CXL_OFFLOAD_VECTOR __m512i rounded() const {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i near = _mm512_add_epi32(bits, half);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(near, nan, bits, _mm512_set1_epi32(0x400000));
  }
  CXL_OFFLOAD_VECTOR __m256i bf16() const {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(), 16));
  }
  CXL_OFFLOAD_VECTOR __m256i f16() const {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  }
};

CXL_OFFLOAD_VECTOR Vector add(Vector a, Vector b) { return {_mm512_add_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector mul(Vector a, Vector b) { return {_mm512_mul_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector div(Vector a, Vector b) { return {_mm512_div_ps(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector fma(Vector a, Vector b, Vector c) {
  return {_mm512_fmadd_ps(a.value, b.value, c.value)};
}
CXL_OFFLOAD_VECTOR Vector root(Vector a) { return {_mm512_sqrt_ps(a.value)}; }
// 1, -1, or the value itself when it is a zero or a NaN.
CXL_OFFLOAD_VECTOR Vector sign(Vector a) {
  const __mmask16 either = _mm512_cmp_ps_mask(a.value, _mm512_setzero_ps(), _CMP_NEQ_OQ);
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 signed_one = _mm512_or_ps(_mm512_and_ps(a.value, _mm512_set1_ps(-0.0f)), one);
  return {_mm512_mask_blend_ps(either, a.value, signed_one)};
}

#undef CXL_OFFLOAD_VECTOR

#define CXL_OFFLOAD_PREFETCH_ELEMENTS 1024
#include "kernels/update_loop.inc.h"

}  // namespace

UpdatePass update_pass_avx512(const PassKey& key) { return find_pass(key); }

}  // namespace cxl_offload

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace cxl_offload {

UpdatePass update_pass_avx512(const PassKey&) { return nullptr; }

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_X86
