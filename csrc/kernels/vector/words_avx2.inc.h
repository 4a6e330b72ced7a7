// Whole numbers beside avx2.inc.h.

// As many whole numbers of 32 bits, without sign, as a `Vector` has lanes.
struct Words {
  __m256i value;

  CXL_OFFLOAD_VECTOR static Words all(uint32_t value) {
    return {_mm256_set1_epi32(static_cast<int>(value))};
  }
  // Returns 0, 1, 2, ..., one number in each lane.
  CXL_OFFLOAD_VECTOR static Words count() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
  CXL_OFFLOAD_VECTOR static Words load(const uint8_t* at) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at))};
  }
  // Loads bytes and copies the highest bit of each into all bits above it.
  CXL_OFFLOAD_VECTOR static Words load_signed(const uint8_t* at) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at))};
  }
  // Stores the low bytes.
  CXL_OFFLOAD_VECTOR void store(uint8_t* at) const {
    const __m256i low = _mm256_and_si256(value, _mm256_set1_epi32(0xff));
    const __m256i words = _mm256_packus_epi32(low, low);
    const __m256i bytes = _mm256_packus_epi16(words, words);
    const __m128i high = _mm256_extracti128_si256(bytes, 1);
    _mm_storel_epi64((__m128i*)at, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), high));
  }
  CXL_OFFLOAD_VECTOR uint32_t greatest() const {
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }
};

CXL_OFFLOAD_VECTOR Words add(Words a, Words b) { return {_mm256_add_epi32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words sub(Words a, Words b) { return {_mm256_sub_epi32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words mul(Words a, Words b) { return {_mm256_mullo_epi32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words both(Words a, Words b) { return {_mm256_and_si256(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words either(Words a, Words b) { return {_mm256_or_si256(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words differing(Words a, Words b) {
  return {_mm256_xor_si256(a.value, b.value)};
}
CXL_OFFLOAD_VECTOR Words larger(Words a, Words b) { return {_mm256_max_epu32(a.value, b.value)}; }
// Returns the bits of `a` where the mask has ones, and those of `b` elsewhere.
CXL_OFFLOAD_VECTOR Words chosen(Words mask, Words a, Words b) {
  return {_mm256_or_si256(_mm256_and_si256(mask.value, a.value),
                          _mm256_andnot_si256(mask.value, b.value))};
}
template <int kBits>
CXL_OFFLOAD_VECTOR Words up(Words a) {
  return {_mm256_slli_epi32(a.value, kBits)};
}
template <int kBits>
CXL_OFFLOAD_VECTOR Words down(Words a) {
  return {_mm256_srli_epi32(a.value, kBits)};
}
CXL_OFFLOAD_VECTOR Words bits_of(Vector a) { return {_mm256_castps_si256(a.value)}; }
CXL_OFFLOAD_VECTOR Vector number_of(Words a) { return {_mm256_castsi256_ps(a.value)}; }
// Stores numbers as bfloat16. A number is rounded up where `noise`, of 16 bits, plus the 16 bits
// that bfloat16 has no room for carries into the bits above.
CXL_OFFLOAD_VECTOR void store_noisy(Vector a, Words noise, Bf16* at) {
  _mm_storeu_si128((__m128i*)at, Vector::high_words(a.rounded(noise.value)));
}
