// Adds rows of 4-bit codes, times their weights, to sums. Included by attention_integers.inc.h.

// Puts the quarters of a vector, of four lanes each, into the order that kOrder says.
template <int kOrder>
CXL_OFFLOAD_VECTOR __m512 fours(__m512 a) {
  return _mm512_shuffle_f32x4(a, a, kOrder);
}

// Sums the lanes of each group, which are in the order of ScaleOrder. With two groups every lane of
// the first half gets the sum of the first group, and every lane of the second half that of the
// second group. With one group every lane gets the sum of all lanes.
template <size_t kGroups>
CXL_OFFLOAD_VECTOR __m512 total_of_groups(__m512 a) {
  a = _mm512_add_ps(a, fours<0x4e>(a));
  a = _mm512_add_ps(a, _mm512_permute_ps(a, 0xb1));
  a = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4e));
  if constexpr (kGroups == 2) return fours<0x50>(a);
  return _mm512_add_ps(a, fours<0xb1>(a));
}

// The weights of the rows of a chunk times the steps of the rows, as the digits of whole numbers.
// Four rows of one group take 16 bytes: four bytes for each of the three digits, and four that are
// not used.
template <size_t kGroups, size_t kMost>
struct WholeWeights {
  CXL_OFFLOAD_VECTOR void make(const CodesOf& of, size_t from, size_t count, size_t head,
                               bool inverse, const float* weights) {
    __m512 product[kMost / 16][kGroups];
    __m512 most = _mm512_setzero_ps();
    __m512 low = _mm512_setzero_ps();
    __mmask16 odd = 0;
    for (size_t at = 0; at < count; at += 16) {
      __m512i halves[kGroups];
      load_halves<kGroups>(of.groups + from + at, head * of.groups_step,
                           of.in_line && at + 16 <= count, halves);
      const auto scales = scales_of<kGroups>(halves, inverse);
      const __m512 weight = _mm512_loadu_ps(weights + at);
      for (size_t i = 0; i < kGroups; ++i) {
        const __m512 mine = kGroups == 1 ? weight
                            : i == 0     ? fours<0x50>(weight)
                                         : fours<0xfa>(weight);
        const __m512 lows = _mm512_mul_ps(mine, scales.low[i]);
        product[at / 16][i] = _mm512_mul_ps(mine, scales.step[i]);
        most = _mm512_max_ps(most, _mm512_abs_ps(product[at / 16][i]));
        odd |= not_finite(product[at / 16][i]) | not_finite(lows);
        low = _mm512_add_ps(low, lows);
      }
    }
    finite = odd == 0;
    const float greatest = std::max(_mm512_reduce_max_ps(most), kSmallest);
    unit = greatest / kMostWeight;
    lows = total_of_groups<kGroups>(low);
    const __m512 factor = _mm512_set1_ps(kMostWeight / greatest);
    for (size_t at = 0; at < count; at += 16) {
      for (size_t i = 0; i < kGroups; ++i) {
        write(_mm512_cvtps_epi32(_mm512_mul_ps(product[at / 16][i], factor)),
              digits + (at * kGroups + 16 * i) * 4);
      }
    }
  }

  // Writes the digits of 16 whole numbers. For every four of them it writes their first digits,
  // then their second and their third ones.
  CXL_OFFLOAD_VECTOR static void write(__m512i whole, int8_t* to) {
    const __m512i turned =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i half = _mm512_set1_epi32(0x808080);  // turns unsigned digits into signed ones
    const __m512i raised = _mm512_xor_si512(_mm512_add_epi32(whole, half), half);
    _mm512_store_si512(to, _mm512_shuffle_epi8(raised, turned));
  }

  // Returns one digit of four weights in every lane. The first half of the vector has the weights
  // for the first half of vectors of codes, the second half those for the second.
  CXL_OFFLOAD_VECTOR __m512i digit(size_t quartet, size_t which) const {
    const int8_t* at = digits + quartet * 32 + which * 4;
    int32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + 16, 4);
    return _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xff00, high);
  }

  alignas(kLineBytes) int8_t digits[kMost * kGroups * 4];
  float unit;   // a weight is this times its whole number
  bool finite;  // if false, the rest has no meaning
  __m512 lows;  // the sum of weights times lows
};

// Adds the products of all digits to sums.
template <size_t kGroups, class Weights>
CXL_OFFLOAD_VECTOR void add_sum(const __m512i (&products)[kDigits], const Weights& weights,
                                float* to) {
  __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[1]), _mm512_set1_ps(256),
                                 _mm512_cvtepi32_ps(products[0]));
  whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[2]), _mm512_set1_ps(65536), whole);
  const __m512 unit = _mm512_set1_ps(weights.unit);
  if constexpr (kGroups == 2) {
    const __m512 before = _mm512_add_ps(_mm512_loadu_ps(to), weights.lows);
    _mm512_storeu_ps(to, _mm512_fmadd_ps(whole, unit, before));
  } else {  // the halves belong to different rows
    const __m512 both = _mm512_castps256_ps512(Vector{whole}.half());
    const __m512 before = _mm512_add_ps(_mm512_castps256_ps512(_mm256_loadu_ps(to)), weights.lows);
    _mm256_storeu_ps(to, _mm512_castps512_ps256(_mm512_fmadd_ps(both, unit, before)));
  }
}

// Prefetches N rows of the only head and their scales. Where rows follow one another, it prefetches
// what lies kFarBytes further on.
template <size_t kGroups, size_t N>
CXL_OFFLOAD_VECTOR void ask_for(const CodesOf& of, size_t row, size_t ahead) {
  if (of.in_line) {
    constexpr size_t kLine = kLineBytes / scale_bytes(kGroups);  // rows of scales
#pragma GCC unroll 16
    for (size_t i = 0; i < N; i += 3 - kGroups) {
      prefetch_second(of.rows[row + i] + kFarBytes);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < N; i += kLine) {
      prefetch_second(of.groups[row + i] + kFarBytes / 8);
    }
  } else {
#pragma GCC unroll 16
    for (size_t i = 0; i < N; ++i) {
      prefetch_second(of.rows[row + ahead + i]);
      prefetch_second(of.groups[row + ahead + i]);
    }
  }
}

// Adds a chunk of rows, times their weights, to the sums of a query. The products of one digit in a
// lane add up to kAttentionCodesBlock * 255 * 128 at most, which int32 and float hold exactly.
// Long: one loop, whose sums stay in registers.
template <size_t kGroups, class Weights>
CXL_OFFLOAD_VECTOR void add_chunk(const CodesOf& of, size_t from, size_t count, size_t ahead,
                                  size_t head, const Weights& weights, float* sums) {
  constexpr size_t kRows = kGroups == 2 ? 4 : 8;  // how many rows four vectors have
  const __m512i lowest = _mm512_set1_epi8(15);
  const size_t offset = head * of.step;
  // sum[..][0] are the sums of whole bytes, sum[..][1] those of their lower codes.
  __m512i sum[4][2][kDigits];
#pragma GCC unroll 24
  for (size_t i = 0; i < 8 * kDigits; ++i) {
    sum[i / 2 / kDigits][i / kDigits % 2][i % kDigits] = _mm512_setzero_si512();
  }
  const std::byte* const* rows = of.rows + from;
  for (size_t at = 0; at < count; at += kRows, rows += kRows) {
    if (ahead != 0) ask_for<kGroups, kRows>(of, from + at, ahead);
    __m512i weight[kDigits];
#pragma GCC unroll 3
    for (size_t d = 0; d < kDigits; ++d) weight[d] = weights.digit(at / kRows, d);
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {  // the first or the last 8 of every 16 bytes
      const std::byte* const* again = rows;
      // The compiler has to load the rows again, because there are no registers to keep them in.
      asm("" : "+r"(again));
      __m512i row[4];
#pragma GCC unroll 4
      for (size_t i = 0; i < 4; ++i) row[i] = load_codes<kGroups>(again + i, offset);
      // Bytes of four rows come to lie side by side.
      const auto mix = [half](__m512i a, __m512i b) __attribute__((always_inline)) {
        return half == 0 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
      };
      const __m512i first = mix(row[0], row[1]);
      const __m512i second = mix(row[2], row[3]);
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) {
        const __m512i bytes =
            i == 0 ? _mm512_unpacklo_epi16(first, second) : _mm512_unpackhi_epi16(first, second);
        const __m512i lower = _mm512_and_si512(bytes, lowest);
        auto& mine = sum[2 * half + i];
#pragma GCC unroll 3
        for (size_t d = 0; d < kDigits; ++d) {
          mine[0][d] = multiply(mine[0][d], bytes, weight[d]);
          mine[1][d] = multiply(mine[1][d], lower, weight[d]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; ++i) {
#pragma GCC unroll 3
    for (size_t d = 0; d < kDigits; ++d) {  // a byte less its lower code is 16 times its upper code
      sum[i][0][d] = _mm512_srai_epi32(_mm512_sub_epi32(sum[i][0][d], sum[i][1][d]), 4);
    }
    add_sum<kGroups>(sum[i][0], weights, sums + 16 * i * kGroups);
    add_sum<kGroups>(sum[i][1], weights, sums + (16 * i + 8) * kGroups);
  }
}

// Reads the scales of up to 16 rows of a head, in the order that the loops over numbers use.
template <size_t kGroups>
inline CodeRows rows_of_numbers(const CodesOf& of, size_t from, size_t head,
                                const AttentionState& state) {
  __m512i halves[kGroups];
  load_halves<kGroups>(of.groups + from, head * of.groups_step, false, halves);
  for (size_t i = 0; i < kGroups; ++i) {
    _mm512_storeu_si512(state.halves + 32 * i, halves[i]);
  }
  read_pairs(state.halves, 32 * kGroups, state.inverse, state.scales);
  return {of.rows + from, head * of.step, state.scales, 2 * kGroups};
}

// Adds rows whose weights or scales are not finite. It computes in float.
template <size_t kGroups>
__attribute__((noinline)) void add_numbers(const CodesOf& of, size_t from, size_t count,
                                           size_t head, const AttentionState& state, size_t query,
                                           const float* weights) {
  float sums[kGroupCodes * kGroups] = {};
  for (size_t at = 0; at < count; at += 16) {
    const CodeRows rows = rows_of_numbers<kGroups>(of, from + at, head, state);
    add_codes<Cut<kGroups>, 1>(rows, std::min(count - at, size_t{16}), state, sums, weights + at);
  }
  float* to = state.sums + query * state.padded;
  for (size_t code = 0; code < kGroupCodes * kGroups; ++code) {
    to[integer_place(code, kGroups)] += sums[code_place(code, Vector::kLanes)];
  }
}

// Computes the scores of 16 rows in float.
template <size_t kGroups>
__attribute__((noinline)) void score_numbers(const CodesOf& of, size_t from, size_t head,
                                             const AttentionState& state, size_t query,
                                             float* scores) {
  CodeRows rows = rows_of_numbers<kGroups>(of, from, head, state);
  const float* q = state.q + query * state.padded;
  for (size_t at = 0; at < 16; at += 4, rows.skip(4)) {
    score_codes<Cut<kGroups>, 4, 1>(rows, state, q, scores + at);
  }
}
