// Decode attention with AVX512-BF16, over caches of bfloat16 for queries of bfloat16.
#include "kernels/attention_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_X86

#include "kernels/vector/target_avx512bf16.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/avx512.inc.h"
//
#include "kernels/attention_loop.inc.h"

// A number of a row of K that is multiplied as it is.
struct Bf16Factor {
  uint16_t bits;
};

// One instruction adds two products to each sum. The queries are bfloat16 too.
template <size_t N, size_t Q>
struct Scores<Bf16Factor, N, Q> {
  static constexpr bool kAddsOne = false;

  Scores(const Bf16Factor* const* row, const float* q, size_t q_step)
      : row(row), q(q), q_step(q_step) {
#pragma GCC unroll 16
    for (size_t i = 0; i < Q * N; ++i) sum[i / N][i % N] = Vector::all(0);
  }

  template <size_t>
  CXL_OFFLOAD_VECTOR void add(size_t at) {
    __m512bh part[N];
#pragma GCC unroll 8
    for (size_t i = 0; i < N; ++i) part[i] = (__m512bh)_mm512_loadu_si512(row[i] + at);
    add_products(part, at);
  }

  CXL_OFFLOAD_VECTOR void add_some(size_t at, size_t count) {
    __m512bh part[N];
    const __mmask32 some = (uint32_t{1} << count) - 1;
#pragma GCC unroll 8
    for (size_t i = 0; i < N; ++i) part[i] = (__m512bh)_mm512_maskz_loadu_epi16(some, row[i] + at);
    add_products(part, at);
  }

  CXL_OFFLOAD_VECTOR void add_products(const __m512bh (&part)[N], size_t at) {
#pragma GCC unroll 4
    for (size_t j = 0; j < Q; ++j) {
      const auto* numbers = reinterpret_cast<const Bf16*>(q + j * q_step) + at;
      const auto number = (__m512bh)_mm512_loadu_si512(numbers);
#pragma GCC unroll 8
      for (size_t i = 0; i < N; ++i) {
        sum[j][i].value = _mm512_dpbf16_ps(sum[j][i].value, part[i], number);
      }
    }
  }

  const Bf16Factor* const* row;
  const float* q;
  size_t q_step;
  Vector sum[Q][N];
};

}  // namespace

AttentionPass attention_pass_bf16() {
  return has_bf16_vectors() ? attend<Bf16, Bf16Factor> : nullptr;
}

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

AttentionPass attention_pass_bf16() { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
