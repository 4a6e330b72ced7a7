// Whole numbers beside avx512.inc.h.

// As many whole numbers of 32 bits, without sign, as a `Vector` has lanes.
struct Words {
  __m512i value;

  CXL_OFFLOAD_VECTOR static Words all(uint32_t value) {
    return {_mm512_set1_epi32(static_cast<int>(value))};
  }
  // Returns 0, 1, 2, ..., one number in each lane.
  CXL_OFFLOAD_VECTOR static Words count() {
    return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
  }
  CXL_OFFLOAD_VECTOR static Words load(const uint8_t* at) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at))};
  }
  // Loads bytes and copies the highest bit of each into all bits above it.
  CXL_OFFLOAD_VECTOR static Words load_signed(const uint8_t* at) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at))};
  }
  // Stores the low bytes.
  CXL_OFFLOAD_VECTOR void store(uint8_t* at) const {
    _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(value));
  }
  CXL_OFFLOAD_VECTOR uint32_t greatest() const { return _mm512_reduce_max_epu32(value); }
};

CXL_OFFLOAD_VECTOR Words add(Words a, Words b) { return {_mm512_add_epi32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words sub(Words a, Words b) { return {_mm512_sub_epi32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words mul(Words a, Words b) { return {_mm512_mullo_epi32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words both(Words a, Words b) { return {_mm512_and_si512(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words either(Words a, Words b) { return {_mm512_or_si512(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words differing(Words a, Words b) {
  return {_mm512_xor_si512(a.value, b.value)};
}
CXL_OFFLOAD_VECTOR Words larger(Words a, Words b) { return {_mm512_max_epu32(a.value, b.value)}; }
// Returns the bits of `a` where the mask has ones, and those of `b` elsewhere.
CXL_OFFLOAD_VECTOR Words chosen(Words mask, Words a, Words b) {
  return {_mm512_ternarylogic_epi32(mask.value, a.value, b.value, 0xca)};
}
template <int kBits>
CXL_OFFLOAD_VECTOR Words up(Words a) {
  return {_mm512_slli_epi32(a.value, kBits)};
}
template <int kBits>
CXL_OFFLOAD_VECTOR Words down(Words a) {
  return {_mm512_srli_epi32(a.value, kBits)};
}
CXL_OFFLOAD_VECTOR Words bits_of(Vector a) { return {_mm512_castps_si512(a.value)}; }
CXL_OFFLOAD_VECTOR Vector number_of(Words a) { return {_mm512_castsi512_ps(a.value)}; }
// Stores numbers as bfloat16. A number is rounded up where `noise`, of 16 bits, plus the 16 bits
// that bfloat16 has no room for carries into the bits above.
CXL_OFFLOAD_VECTOR void store_noisy(Vector a, Words noise, Bf16* at) {
  const __m512i words = _mm512_srli_epi32(a.rounded(noise.value), 16);
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(words));
}
