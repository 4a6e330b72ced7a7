// Sixteen numbers in a register of AVX-512 (F, BW, DQ and VL).

// A code of a row that has no NaN. The only code that is a NaN has the greatest magnitude.
struct E4m3NoNan {
  uint8_t bits;

  CXL_OFFLOAD_VECTOR static bool any_nan(const E4m3* const* rows, size_t count, size_t dim) {
    const __m512i sign = _mm512_set1_epi8(-128);
    // The greatest of the codes, taken as unsigned bytes after the sign bit is set in all of them.
    __m512i most = sign;
    for (size_t i = 0; i < count; ++i) {
      size_t at = 0;
      for (; at + sizeof(__m512i) <= dim; at += sizeof(__m512i)) {
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
  static constexpr size_t kRegisters = 32;
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
  // Loads numbers of 8 bits.
  template <class T>
  CXL_OFFLOAD_VECTOR static Vector load(const T* at) {
    return wide(at, _mm_loadu_si128((const __m128i*)at));
  }
  // Loads two vectors of float8 at once. Half precision is converted from memory in one step, and
  // from a register in two, so what is converted goes through memory.
  template <class T>
    requires(std::is_same_v<T, E4m3> || std::is_same_v<T, E4m3NoNan> || std::is_same_v<T, E5m2>)
  CXL_OFFLOAD_VECTOR static void load_two(const T* at, Vector& first, Vector& second) {
    __m512i halves = wide_halves(at, _mm256_loadu_si256((const __m256i*)at));
    asm("" : "+m"(halves));
    first = {_mm512_cvtph_ps(_mm256_load_si256((const __m256i*)&halves))};
    second = {_mm512_cvtph_ps(_mm256_load_si256((const __m256i*)&halves + 1))};
  }
  // Loads `count` elements and puts zeros into the other lanes. It reads no memory beyond them.
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
  CXL_OFFLOAD_VECTOR void store(Bf16* at) const { _mm256_storeu_si256((__m256i*)at, bf16()); }
  CXL_OFFLOAD_VECTOR void store(F16* at) const { _mm256_storeu_si256((__m256i*)at, f16()); }
  // Stores the numbers past the caches.
  CXL_OFFLOAD_VECTOR void stream(Bf16* at) const { _mm256_stream_si256((__m256i*)at, bf16()); }
  CXL_OFFLOAD_VECTOR void stream(F16* at) const { _mm256_stream_si256((__m256i*)at, f16()); }
  CXL_OFFLOAD_VECTOR static void wait_for_stores() { _mm_sfence(); }

  // Loads the even elements into one vector and the odd ones into another, which needs no shuffle.
  CXL_OFFLOAD_VECTOR static void load_pair(const Bf16* at, Vector& even, Vector& odd) {
    __m512i both = _mm512_loadu_si512(at);
    asm("" : "+v"(both));  // else the compiler loads it twice, once for each use
    even = {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))};
    odd = {_mm512_castsi512_ps(_mm512_and_si512(both, high_halves()))};
  }
  CXL_OFFLOAD_VECTOR static void store_pair(Bf16* at, Vector even, Vector odd) {
#ifdef CXL_OFFLOAD_ROUNDS_TO_BF16
    if (!any_subnormal(even, odd)) {
      const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd.value, even.value);
      _mm512_storeu_si512(at, _mm512_permutexvar_epi16(in_turns(), halves));
      return;
    }
#endif
    const __m512i low = _mm512_srli_epi32(even.rounded(), 16);
    // low | (odd & high_halves)
    _mm512_storeu_si512(at, _mm512_ternarylogic_epi32(low, odd.rounded(), high_halves(), 0xf8));
  }

  CXL_OFFLOAD_VECTOR float total() const { return _mm512_reduce_add_ps(value); }
  CXL_OFFLOAD_VECTOR float greatest() const { return _mm512_reduce_max_ps(value); }
  // Writes the totals of four vectors. It takes fewer steps than one total at a time.
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
  // Converts as to_float() does, but leaves out the last factor. A number that was widened with its
  // sign has the sign in bit 15 after the shift.
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
  CXL_OFFLOAD_VECTOR static __m512i wide_halves(const E4m3NoNan*, __m256i bits) {
    const __m512i shifted = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bits), 7);
    return _mm512_and_si512(shifted, _mm512_set1_epi16(-0x4080));
  }
  CXL_OFFLOAD_VECTOR static __m512i wide_halves(const E4m3*, __m256i bits) {
    const __m512i small = wide_halves(static_cast<const E4m3NoNan*>(nullptr), bits);
    const __m512i carried = _mm512_add_epi16(small, _mm512_set1_epi16(0x80));
    // small | (carried & 0x4000)
    return _mm512_ternarylogic_epi32(small, carried, _mm512_set1_epi16(0x4000), 0xf8);
  }
  CXL_OFFLOAD_VECTOR static __m512i wide_halves(const E5m2*, __m256i bits) {
    return _mm512_slli_epi16(_mm512_cvtepu8_epi16(bits), 8);
  }
  CXL_OFFLOAD_VECTOR static Vector wide(const int8_t*, __m128i bits) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits))};
  }
  // The instruction that rounds to bfloat16 takes such numbers for zeros.
  CXL_OFFLOAD_VECTOR static bool any_subnormal(Vector a, Vector b) {
    constexpr int kSubnormal = 0x20;
    return _kortestz_mask16_u8(_mm512_fpclass_ps_mask(a.value, kSubnormal),
                               _mm512_fpclass_ps_mask(b.value, kSubnormal)) == 0;
  }
  // The order in which the lower and the upper half of a register take turns.
  CXL_OFFLOAD_VECTOR static __m512i in_turns() {
    const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // Words are pairs of indices: each of the lower half, and 16 more.
    const __m512i upper = _mm512_slli_epi32(_mm512_add_epi32(lower, _mm512_set1_epi32(16)), 16);
    return _mm512_or_si512(lower, upper);
  }
  CXL_OFFLOAD_VECTOR static Vector wide_bf16(__m256i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  CXL_OFFLOAD_VECTOR static __m512i high_halves() {
    return _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  }
  // Returns numbers whose high halves are the nearest bfloat16, with ties to even. A NaN stays a
  // NaN and becomes a quiet one.
  CXL_OFFLOAD_VECTOR __m512i rounded() const {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return rounded(_mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  }
  // Adds bits below the high halves, which decide whether the high halves are rounded up.
  CXL_OFFLOAD_VECTOR __m512i rounded(__m512i added) const {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i near = _mm512_add_epi32(bits, added);
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
// Multiplies and adds, and rounds once on every processor.
CXL_OFFLOAD_VECTOR Vector fma(Vector a, Vector b, Vector c) {
  return {_mm512_fmadd_ps(a.value, b.value, c.value)};
}
// Multiplies and adds. It rounds once where the processor has an instruction for that, else twice.
CXL_OFFLOAD_VECTOR Vector mul_add(Vector a, Vector b, Vector c) { return fma(a, b, c); }
CXL_OFFLOAD_VECTOR Vector root(Vector a) { return {_mm512_sqrt_ps(a.value)}; }
// Returns 1, -1, or the value itself when it is a zero or a NaN.
CXL_OFFLOAD_VECTOR Vector sign(Vector a) {
  const __mmask16 either = _mm512_cmp_ps_mask(a.value, _mm512_setzero_ps(), _CMP_NEQ_OQ);
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 signed_one = _mm512_or_ps(_mm512_and_ps(a.value, _mm512_set1_ps(-0.0f)), one);
  return {_mm512_mask_blend_ps(either, a.value, signed_one)};
}
// Returns the larger of two numbers, and the second one when either is a NaN.
CXL_OFFLOAD_VECTOR Vector larger(Vector a, Vector b) { return {_mm512_max_ps(a.value, b.value)}; }

// Returns the exponential of numbers that are not above zero. Results below the normal numbers
// become zero. A NaN stays a NaN, because the maximum returns its second operand then.
CXL_OFFLOAD_VECTOR Vector exponential(Vector a) {
  const __m512 least = _mm512_set1_ps(-87.3f);
  const __m512 x = _mm512_max_ps(least, a.value);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // The logarithm of 2 in two parts, so that the rest is exact.
  __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.0f / 5040);  // Taylor's series, for a rest of at most 0.35
#pragma GCC unroll 7
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

// Loads pairs of scales as (step, low). `left` elements are left of the row of pairs.
CXL_OFFLOAD_VECTOR Vector load_pairs(const F16* at, size_t left, GroupScales form) {
  const bool whole = left >= Vector::kLanes;
  const __m512 pairs = (whole ? Vector::load(at) : Vector::load_some(at, left)).value;
  if (form == GroupScales::kInverseLow)
    return {_mm512_mask_mov_ps(pairs, 0x5555, inverse_of(pairs))};
  const __m512 turned = _mm512_permute_ps(pairs, 0xb1);
  if (form == GroupScales::kLowStep) return {turned};
  const __m512 low = _mm512_fnmadd_ps(turned, pairs, _mm512_setzero_ps());
  return {_mm512_mask_mov_ps(low, 0x5555, turned)};
}

// Loads bytes of two 4-bit codes, one byte into each lane.
CXL_OFFLOAD_VECTOR __m512i load_codes(const std::byte* at) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
}
// Loads words of two bytes of 4-bit codes, one word into each lane.
CXL_OFFLOAD_VECTOR __m512i load_words(const std::byte* at) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
}

// Returns the codes that begin at bit kShift of each word, times 2^kShift.
template <int kShift>
CXL_OFFLOAD_VECTOR Vector shifted_code(__m512i words) {
  return {_mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(15 << kShift)))};
}

// The numbers that the 16 codes of a group stand for. A look-up uses the lowest four bits of its
// index.
struct Table {
  Table() = default;
  CXL_OFFLOAD_VECTOR Table(float step, float low) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    numbers = _mm512_fmadd_ps(codes, _mm512_set1_ps(step), _mm512_set1_ps(low));
  }
  template <int kShift>
  CXL_OFFLOAD_VECTOR Vector number(__m512i codes) const {
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(codes, kShift), numbers)};
  }

  __m512 numbers;
};
