// Attention over rows of 4-bit codes, by products of integers: the codes never become
// floating-point numbers. The rows have one or two groups of 64 codes. The source of AVX-512 with
// VNNI includes this file inside of an anonymous namespace, after attention_codes.inc.h.
//
// Each number of a query becomes a whole number, and so does each weight times a step. A whole
// number has three signed digits of one byte, and vpdpbusd multiplies 64 such bytes by 64 codes at
// a time. The digits of q stand for 1, 256 and 32768. A whole number of q is at most kMostQuery, so
// that the products of 64 of them with codes less 8 add up to at most 64 * 8 * kMostQuery. This is
// less than 2^31, so the sum is exact even where its parts wrap around. The digits of weights stand
// for 1, 256 and 65536.
//
// Rounding changes a number of q by at most g / (2 * kMostQuery), where g is the greatest number of
// its group. It changes a weight times a step by at most g / (2 * kMostWeight), where g is the
// greatest of up to kAttentionCodesBlock rows.

constexpr size_t kDigits = 3;
constexpr int kMostQuery = 4'160'000;   // 127 * 32768, less a margin for rounding
constexpr int kMostWeight = 8'300'000;  // 127 * 65536, likewise
constexpr size_t kFarBytes = 12288;     // how far ahead codes that lie in line are prefetched
constexpr float kSmallest = 1e-30f;     // the least divisor
constexpr float kGreatest = 1e30f;

// A vector has 64 bytes of codes: a row of two groups, or two rows of one group that are four rows
// apart. Its two halves have different scales. Returns the first row of vector `index`, counted
// among 16 rows.
template <size_t kGroups>
constexpr size_t first_row(size_t index) {
  return kGroups == 2 ? index : index / 4 * 8 + index % 4;
}

// The order of scales in vectors. The scales of 16 rows are pairs of 16-bit numbers, one row after
// another. With one group `first` takes the first number of each pair and then the second number of
// each. With two groups `first` takes the first numbers and `second` the second ones, and a vector
// of 16 lanes has 8 rows: rows 0 to 3 of the first group, rows 0 to 3 of the second group, rows 4
// to 7 of the first, and rows 4 to 7 of the second.
template <size_t kGroups>
struct ScaleOrder {
  constexpr ScaleOrder() {
    for (size_t i = 0; i < 32; ++i) {
      if (kGroups == 1) {
        first[i] = static_cast<uint16_t>(i % 16 * 2 + i / 16);
        second[i] = 0;
      } else {
        const size_t row = i / 16 * 8 + i % 16 / 8 * 4 + i % 4;
        first[i] = static_cast<uint16_t>(row * 4 + i % 8 / 4 * 2);
        second[i] = static_cast<uint16_t>(first[i] + 1);
      }
    }
  }
  alignas(kLineBytes) uint16_t first[32];
  alignas(kLineBytes) uint16_t second[32];
};

template <size_t kGroups>
inline constexpr ScaleOrder<kGroups> kScaleOrder;

template <size_t kGroups>
struct ScalesOf16 {
  __m512 step[kGroups];
  __m512 low[kGroups];
};

// How many bytes the scales of one row of one head take.
constexpr size_t scale_bytes(size_t groups) { return 2 * sizeof(F16) * groups; }

CXL_OFFLOAD_VECTOR __m128i two_rows(const std::byte* a, const std::byte* b) {
  return _mm_unpacklo_epi64(_mm_loadu_si64(a), _mm_loadu_si64(b));
}

// Loads the scales of 16 rows of a head as they are kept.
template <size_t kGroups>
CXL_OFFLOAD_VECTOR void load_halves(const std::byte* const* rows, size_t offset, bool in_line,
                                    __m512i* to) {
  if (in_line) {
    for (size_t i = 0; i < kGroups; ++i)
      to[i] = _mm512_loadu_si512(rows[0] + offset + sizeof(__m512i) * i);
    return;
  }
  __m128i part[4 * kGroups];
#pragma GCC unroll 8
  for (size_t i = 0; i < 4 * kGroups; ++i) {
    if constexpr (kGroups == 2) {
      part[i] = two_rows(rows[2 * i] + offset, rows[2 * i + 1] + offset);
    } else {
      const __m128i low = _mm_unpacklo_epi32(_mm_loadu_si32(rows[4 * i] + offset),
                                             _mm_loadu_si32(rows[4 * i + 1] + offset));
      const __m128i high = _mm_unpacklo_epi32(_mm_loadu_si32(rows[4 * i + 2] + offset),
                                              _mm_loadu_si32(rows[4 * i + 3] + offset));
      part[i] = _mm_unpacklo_epi64(low, high);
    }
  }
#pragma GCC unroll 2
  for (size_t i = 0; i < kGroups; ++i) {
    const __m256i low = _mm256_set_m128i(part[4 * i + 1], part[4 * i]);
    const __m256i high = _mm256_set_m128i(part[4 * i + 3], part[4 * i + 2]);
    to[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
}

CXL_OFFLOAD_VECTOR __m512 widen(__m512i halves, int which) {
  return _mm512_cvtph_ps(which == 0 ? _mm512_castsi512_si256(halves)
                                    : _mm512_extracti64x4_epi64(halves, 1));
}

template <size_t kGroups>
CXL_OFFLOAD_VECTOR ScalesOf16<kGroups> scales_of(const __m512i* halves, bool inverse) {
  const __m512i order = _mm512_load_si512(kScaleOrder<kGroups>.first);
  __m512i both[2];  // the first numbers of pairs, then the second ones
  __m512 first[kGroups];
  __m512 second[kGroups];
  if constexpr (kGroups == 1) {
    both[0] = _mm512_permutexvar_epi16(order, halves[0]);
    first[0] = widen(both[0], 0);
    second[0] = widen(both[0], 1);
  } else {
    const __m512i paired = _mm512_load_si512(kScaleOrder<kGroups>.second);
    both[0] = _mm512_permutex2var_epi16(halves[0], order, halves[1]);
    both[1] = _mm512_permutex2var_epi16(halves[0], paired, halves[1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      first[i] = widen(both[0], i);
      second[i] = widen(both[1], i);
    }
  }
  ScalesOf16<kGroups> scales;
#pragma GCC unroll 2
  for (size_t i = 0; i < kGroups; ++i) {
    scales.step[i] = inverse ? inverse_of(first[i]) : second[i];
    scales.low[i] = inverse ? second[i] : first[i];
  }
  return scales;
}

// Returns which numbers are NaN or infinite.
CXL_OFFLOAD_VECTOR __mmask16 not_finite(__m512 numbers) {
  return _mm512_fpclass_ps_mask(numbers, 0x99);
}

// The codes of a vector of bytes. of[0] has the upper code of each byte, which comes first in a
// row, and of[1] the lower code.
struct Nibbles {
  CXL_OFFLOAD_VECTOR explicit Nibbles(__m512i bytes) {
    const __m512i lowest = _mm512_set1_epi8(15);
    of[0] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), lowest);
    of[1] = _mm512_and_si512(bytes, lowest);
  }
  __m512i of[2];
};

// Adds the products of four codes and four digits to each lane of `sum`. This is assembly because
// in loops over the intrinsic GCC 12 copies the sums, which costs a third of the time.
CXL_OFFLOAD_VECTOR __m512i multiply(__m512i sum, __m512i codes, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(digits));
  return sum;
}

template <size_t kGroups>
CXL_OFFLOAD_VECTOR __m512i load_codes(const std::byte* const* rows, size_t offset) {
  if constexpr (kGroups == 2) return _mm512_loadu_si512(rows[0] + offset);
  const __m256i low = _mm256_loadu_si256((const __m256i*)(rows[0] + offset));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low),
                            _mm256_loadu_si256((const __m256i*)(rows[4] + offset)), 1);
}

// The order matters, because the last one uses the other two.
#include "kernels/attention_integer_keys.inc.h"
//
#include "kernels/attention_integer_values.inc.h"
//
#include "kernels/attention_integer_rows.inc.h"

template <size_t kGroups>
void attend_integers(const AttentionRows& rows, const AttentionState& state) {
  const CodesOf k{rows.k, rows.k_groups, rows.k_step, rows.k_groups_step, rows.k_in_line};
  const CodesOf v{rows.v, rows.v_groups, rows.v_step, rows.v_groups_step, rows.v_in_line};
  if (state.first) {
    for (size_t i = 0; i < state.kv_heads * state.group; ++i) {
      make_whole<kGroups>(state.q + i * state.padded, state.whole[i]);
    }
  }
  visit_integers<kGroups, true>(k, rows, state);
  scores_to_weights(rows, state);
  visit_integers<kGroups, false>(v, rows, state);
}
