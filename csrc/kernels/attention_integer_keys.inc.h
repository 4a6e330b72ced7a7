// Computes scores of rows of 4-bit codes. Included by attention_integers.inc.h.

// Returns a vector with `first` and `second` in the lanes that ScaleOrder gives the two groups.
// With one group all lanes are `first`.
template <size_t kGroups>
CXL_OFFLOAD_VECTOR __m512 of_groups(float first, float second) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(first), kGroups == 2 ? 0xf0f0 : 0,
                            _mm512_set1_ps(second));
}

// Writes the digits of 64 whole numbers of a query. The numbers are in the order of code_place().
CXL_OFFLOAD_VECTOR void write_digits(const __m512i* whole, WholeQuery& to, size_t at) {
  __m512i digit[kDigits][kWordCodes];
  for (size_t c = 0; c < kWordCodes; ++c) {
    // `raise` is added so that all digits are positive and can be masked out, and then each digit
    // is lowered again. The last digit is kept with its sign changed, because multiply_four()
    // multiplies it by what it stands for as a number of 16 bits: -32768 fits in one, 32768 does
    // not.
    const __m512i raise = _mm512_set1_epi32(128 + (64 << 8) + (128 << 15));
    const __m512i raised = _mm512_add_epi32(whole[c], raise);
    digit[0][c] =
        _mm512_sub_epi32(_mm512_and_si512(raised, _mm512_set1_epi32(255)), _mm512_set1_epi32(128));
    digit[1][c] =
        _mm512_sub_epi32(_mm512_and_si512(_mm512_srli_epi32(raised, 8), _mm512_set1_epi32(127)),
                         _mm512_set1_epi32(64));
    digit[2][c] = _mm512_sub_epi32(_mm512_set1_epi32(128), _mm512_srli_epi32(raised, 15));
  }
  for (size_t d = 0; d < kDigits; ++d) {
    // Of the two bytes of a word the upper codes come first, then the lower ones.
    for (size_t upper = 0; upper < 2; ++upper) {
      const __m512i even = _mm512_and_si512(digit[d][upper], _mm512_set1_epi32(255));
      const __m512i odd = _mm512_slli_epi32(digit[d][upper + 2], 8);
      _mm256_storeu_si256((__m256i*)(to.digits[upper][d] + at),
                          _mm512_cvtepi32_epi16(_mm512_or_si512(even, odd)));
    }
  }
}

// Turns the numbers of a query into whole numbers.
template <size_t kGroups>
CXL_OFFLOAD_VECTOR void make_whole(const float* q, WholeQuery& to) {
  float unit[2] = {};
  float sum[2] = {};
  float middle[2] = {};
  to.fits = true;
  for (size_t group = 0; group < kGroups; ++group) {
    __m512 part[kWordCodes];
    __m512 most = _mm512_setzero_ps();
    __m512 all = _mm512_setzero_ps();
    __mmask16 odd = 0;
    for (size_t c = 0; c < kWordCodes; ++c) {
      part[c] = _mm512_loadu_ps(q + group * kGroupCodes + c * 16);
      most = _mm512_max_ps(most, _mm512_abs_ps(part[c]));
      all = _mm512_add_ps(all, part[c]);
      odd |= not_finite(part[c]);
    }
    const float greatest = _mm512_reduce_max_ps(most);
    if (odd != 0 || greatest > kGreatest) to.fits = false;
    const float factor = kMostQuery / std::max(greatest, kSmallest);
    __m512i whole[kWordCodes];
    for (size_t c = 0; c < kWordCodes; ++c) {
      whole[c] = _mm512_cvtps_epi32(_mm512_mul_ps(part[c], _mm512_set1_ps(factor)));
    }
    write_digits(whole, to, group * 32);
    if (kGroups == 1) write_digits(whole, to, 32);
    const __m512i sums = _mm512_add_epi32(_mm512_add_epi32(whole[0], whole[1]),
                                          _mm512_add_epi32(whole[2], whole[3]));
    unit[group] = std::max(greatest, kSmallest) / kMostQuery;
    sum[group] = _mm512_reduce_add_ps(all);
    // This is stored as the bits of an int32. 8 times the sum of 64 whole numbers fits in one.
    middle[group] = std::bit_cast<float>(8 * _mm512_reduce_add_epi32(sums));
  }
  _mm512_store_ps(to.unit, of_groups<kGroups>(unit[0], unit[1]));
  _mm512_store_ps(to.sum, of_groups<kGroups>(sum[0], sum[1]));
  _mm512_store_ps(to.middle, of_groups<kGroups>(middle[0], middle[1]));
}

// Multiplies four vectors of codes by q and sums each half of a vector by itself. The sums of
// vector i are in lane i of every four lanes. The first and the third four lanes belong to the
// first half of the vectors, the second and the fourth to the second half.
template <size_t kGroups>
CXL_OFFLOAD_VECTOR __m512i multiply_four(const std::byte* const* rows, size_t offset, size_t first,
                                         const __m512i (&q)[2][kDigits]) {
  // The products of one digit in a lane add up to 8 * 15 * 128 at most, which fits in 16 bits.
  constexpr short kWorth[kDigits] = {1, 256, -32768};
  __m512i sum[2];
#pragma GCC unroll 2
  for (size_t pair = 0; pair < 2; ++pair) {
    __m512i part[2][kDigits];
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i) {
      const size_t row = first_row<kGroups>(first + 2 * pair + i);
      const Nibbles codes(load_codes<kGroups>(rows + row, offset));
#pragma GCC unroll 3
      for (size_t d = 0; d < kDigits; ++d) {
        const __m512i upper = multiply(_mm512_setzero_si512(), codes.of[0], q[0][d]);
        part[i][d] = multiply(upper, codes.of[1], q[1][d]);
      }
    }
    sum[pair] = _mm512_setzero_si512();
#pragma GCC unroll 3
    for (size_t d = 0; d < kDigits; ++d) {
      sum[pair] = _mm512_dpwssd_epi32(sum[pair], _mm512_packs_epi32(part[0][d], part[1][d]),
                                      _mm512_set1_epi16(kWorth[d]));
    }
  }
  const __m512 a = _mm512_castsi512_ps(sum[0]);
  const __m512 b = _mm512_castsi512_ps(sum[1]);
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                          _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
}

// Does the same for eight vectors. The result is in the order of ScaleOrder.
template <size_t kGroups>
CXL_OFFLOAD_VECTOR __m512i multiply_eight(const std::byte* const* rows, size_t offset, size_t first,
                                          const __m512i (&q)[2][kDigits]) {
  const __m512i a = multiply_four<kGroups>(rows, offset, first, q);
  const __m512i b = multiply_four<kGroups>(rows, offset, first + 4, q);
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// Computes the scores of 16 rows for one query. Returns whether all of them are finite. Where they
// are not, a scale may be infinite, and then the scaled sum of products is not the sum of scaled
// products; the caller computes such scores with score_numbers().
template <size_t kGroups>
CXL_OFFLOAD_VECTOR bool score_16(const std::byte* const* rows, size_t offset,
                                 const ScalesOf16<kGroups>& scales, const WholeQuery& query,
                                 float* to) {
  __m512i q[2][kDigits];
#pragma GCC unroll 6
  for (size_t i = 0; i < 2 * kDigits; ++i) {
    q[i / kDigits][i % kDigits] = _mm512_load_si512(query.digits[i / kDigits][i % kDigits]);
  }
  __m512 score[kGroups];
#pragma GCC unroll 2
  for (size_t i = 0; i < kGroups; ++i) {
    // This uses codes less 8. With codes from 0 to 15 the products and the lows would nearly cancel
    // each other, which loses digits.
    const __m512i products = _mm512_sub_epi32(multiply_eight<kGroups>(rows, offset, 8 * i, q),
                                              _mm512_castps_si512(_mm512_load_ps(query.middle)));
    const __m512 low = _mm512_fmadd_ps(scales.step[i], _mm512_set1_ps(8), scales.low[i]);
    const __m512 step = _mm512_mul_ps(scales.step[i], _mm512_load_ps(query.unit));
    score[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), step,
                               _mm512_mul_ps(low, _mm512_load_ps(query.sum)));
  }
  if constexpr (kGroups == 2) {
    score[0] = _mm512_add_ps(_mm512_shuffle_f32x4(score[0], score[1], 0x88),
                             _mm512_shuffle_f32x4(score[0], score[1], 0xdd));
  }
  _mm512_storeu_ps(to, score[0]);
  return not_finite(score[0]) == 0;
}
