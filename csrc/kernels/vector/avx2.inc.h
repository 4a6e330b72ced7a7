// Eight numbers in a register of AVX2, with FMA and F16C.

struct Vector {
  static constexpr size_t kLanes = 8;
  static constexpr size_t kRegisters = 16;
  template <class T>
  using NoNan = T;
  __m256 value;

  CXL_OFFLOAD_VECTOR static Vector all(float value) { return {_mm256_set1_ps(value)}; }
  // Returns `first` in the lower lanes and `second` in the upper ones.
  CXL_OFFLOAD_VECTOR static Vector halves(float first, float second) {
    return {_mm256_blend_ps(_mm256_set1_ps(first), _mm256_set1_ps(second), 0xf0)};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const float* at) { return {_mm256_loadu_ps(at)}; }
  CXL_OFFLOAD_VECTOR static Vector load(const Bf16* at) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const F16* at) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at))};
  }
  // Converts as to_float() does, but leaves out the last factor. A number that was widened with its
  // sign has the sign in bit 15 after the shift.
  CXL_OFFLOAD_VECTOR static Vector load(const E4m3* at) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)at));
    const __m128i small = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(-0x4080));
    const __m128i carried = _mm_add_epi16(small, _mm_set1_epi16(0x80));
    const __m128i nan = _mm_and_si128(carried, _mm_set1_epi16(0x4000));
    return {_mm256_cvtph_ps(_mm_or_si128(small, nan))};
  }
  // Loads two vectors at once. A processor converts half precision from memory in one step and from
  // a register in two, so what is converted goes through memory.
  CXL_OFFLOAD_VECTOR static void load_two(const E4m3* at, Vector& first, Vector& second) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at));
    const __m256i small = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(-0x4080));
    const __m256i carried = _mm256_add_epi16(small, _mm256_set1_epi16(0x80));
    const __m256i nan = _mm256_and_si256(carried, _mm256_set1_epi16(0x4000));
    __m256i halves = _mm256_or_si256(small, nan);
    asm("" : "+m"(halves));
    first = {_mm256_cvtph_ps(_mm_load_si128((const __m128i*)&halves))};
    second = {_mm256_cvtph_ps(_mm_load_si128((const __m128i*)&halves + 1))};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const E5m2* at) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)at));
    return {_mm256_cvtph_ps(_mm_slli_epi16(wide, 8))};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const int8_t* at) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)))};
  }
  // Loads `count` elements and puts zeros into the other lanes. It reads no memory beyond them.
  template <class T>
  CXL_OFFLOAD_VECTOR static Vector load_some(const T* at, size_t count) {
    T some[kLanes] = {};
    std::memcpy(some, at, count * sizeof(T));
    return load(some);
  }

  CXL_OFFLOAD_VECTOR void store(float* at) const { _mm256_storeu_ps(at, value); }
  CXL_OFFLOAD_VECTOR void store(Bf16* at) const { _mm_storeu_si128((__m128i*)at, bf16()); }
  CXL_OFFLOAD_VECTOR void store(F16* at) const { _mm_storeu_si128((__m128i*)at, f16()); }
  // Stores the numbers past the caches.
  CXL_OFFLOAD_VECTOR void stream(Bf16* at) const { _mm_stream_si128((__m128i*)at, bf16()); }
  CXL_OFFLOAD_VECTOR void stream(F16* at) const { _mm_stream_si128((__m128i*)at, f16()); }
  CXL_OFFLOAD_VECTOR static void wait_for_stores() { _mm_sfence(); }

  // Loads the even elements into one vector and the odd ones into another, which needs no shuffle.
  CXL_OFFLOAD_VECTOR static void load_pair(const Bf16* at, Vector& even, Vector& odd) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)at);
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(both, high_halves()))};
  }
  CXL_OFFLOAD_VECTOR static void store_pair(Bf16* at, Vector even, Vector odd) {
    const __m256i low = _mm256_srli_epi32(even.rounded(), 16);
    _mm256_storeu_si256((__m256i*)at, _mm256_blend_epi16(low, odd.rounded(), 0xaa));
  }

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
  // Writes the totals of four vectors. It takes fewer steps than one total at a time.
  CXL_OFFLOAD_VECTOR static void totals(const Vector* four, float* to) {
    const __m256 low = _mm256_hadd_ps(four[0].value, four[1].value);
    const __m256 high = _mm256_hadd_ps(four[2].value, four[3].value);
    const __m256 all = _mm256_hadd_ps(low, high);
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    _mm_storeu_ps(to, sums);
  }

  CXL_OFFLOAD_VECTOR static __m256i high_halves() {
    return _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  }
  // Returns numbers whose high halves are the nearest bfloat16, with ties to even. A NaN stays a
  // NaN and becomes a quiet one.
  CXL_OFFLOAD_VECTOR __m256i rounded() const {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return rounded(_mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  }
  // Adds bits below the high halves, which decide whether the high halves are rounded up.
  CXL_OFFLOAD_VECTOR __m256i rounded(__m256i added) const {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i near = _mm256_add_epi32(bits, added);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(near, quiet, nan);
  }
  CXL_OFFLOAD_VECTOR __m128i bf16() const { return high_words(rounded()); }
  CXL_OFFLOAD_VECTOR static __m128i high_words(__m256i halves) {
    const __m256i words = _mm256_srli_epi32(halves, 16);
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
// Multiplies and adds, and rounds once on every processor.
CXL_OFFLOAD_VECTOR Vector fma(Vector a, Vector b, Vector c) {
  return {_mm256_fmadd_ps(a.value, b.value, c.value)};
}
// Multiplies and adds. It rounds once where the processor has an instruction for that, else twice.
CXL_OFFLOAD_VECTOR Vector mul_add(Vector a, Vector b, Vector c) { return fma(a, b, c); }
CXL_OFFLOAD_VECTOR Vector root(Vector a) { return {_mm256_sqrt_ps(a.value)}; }
// Returns 1, -1, or the value itself when it is a zero or a NaN.
CXL_OFFLOAD_VECTOR Vector sign(Vector a) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 signed_one =
      _mm256_or_ps(_mm256_and_ps(a.value, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
  return {_mm256_blendv_ps(a.value, signed_one, _mm256_cmp_ps(a.value, zero, _CMP_NEQ_OQ))};
}
// Returns the larger of two numbers, and the second one when either is a NaN.
CXL_OFFLOAD_VECTOR Vector larger(Vector a, Vector b) { return {_mm256_max_ps(a.value, b.value)}; }

// Returns the exponential of numbers that are not above zero. Results below the normal numbers
// become zero. A NaN stays a NaN, because the maximum returns its second operand then.
CXL_OFFLOAD_VECTOR Vector exponential(Vector a) {
  const __m256 least = _mm256_set1_ps(-87.3f);
  const __m256 x = _mm256_max_ps(least, a.value);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // The logarithm of 2 in two parts, so that the rest is exact.
  __m256 rest = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  rest = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), rest);
  __m256 sum = _mm256_set1_ps(1.0f / 5040);  // Taylor's series, for a rest of at most 0.35
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(term));
  }
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  const __m256 tiny = _mm256_cmp_ps(a.value, least, _CMP_LT_OQ);
  return {_mm256_andnot_ps(tiny, _mm256_mul_ps(sum, power))};
}

// Loads pairs of scales as (step, low). `left` elements are left of the row of pairs.
CXL_OFFLOAD_VECTOR Vector load_pairs(const F16* at, size_t left, GroupScales form) {
  const bool whole = left >= Vector::kLanes;
  const __m256 pairs = (whole ? Vector::load(at) : Vector::load_some(at, left)).value;
  if (form == GroupScales::kInverseLow) {
    return {_mm256_blend_ps(_mm256_div_ps(_mm256_set1_ps(1), pairs), pairs, 0xaa)};
  }
  const __m256 turned = _mm256_permute_ps(pairs, 0xb1);
  if (form == GroupScales::kLowStep) return {turned};
  return {_mm256_blend_ps(turned, _mm256_fnmadd_ps(turned, pairs, _mm256_setzero_ps()), 0xaa)};
}

// Loads words of two bytes of 4-bit codes, one word into each lane.
CXL_OFFLOAD_VECTOR __m256i load_words(const std::byte* at) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
}

// Loads words of eight 4-bit codes, one word into each lane.
CXL_OFFLOAD_VECTOR __m256i load_eights(const std::byte* at) {
  return _mm256_loadu_si256((const __m256i*)at);
}

// Returns the codes that begin at bit kShift of each word, times 2^kShift.
template <int kShift>
CXL_OFFLOAD_VECTOR Vector shifted_code(__m256i words) {
  return {_mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15 << kShift)))};
}
// Returns the codes in the highest four bits of each word.
CXL_OFFLOAD_VECTOR Vector top_code(__m256i words) {
  return {_mm256_cvtepi32_ps(_mm256_srli_epi32(words, 28))};
}

// The numbers that the codes of a group stand for.
struct Table {
  Table() = default;
  CXL_OFFLOAD_VECTOR Table(float step, float low)
      : step(_mm256_set1_ps(step)), low(_mm256_set1_ps(low)) {}
  template <int kShift>
  CXL_OFFLOAD_VECTOR Vector number(__m256i codes) const {
    const __m256i code = _mm256_and_si256(_mm256_srli_epi32(codes, kShift), _mm256_set1_epi32(15));
    return {_mm256_fmadd_ps(_mm256_cvtepi32_ps(code), step, low)};
  }

  __m256 step;
  __m256 low;
};
