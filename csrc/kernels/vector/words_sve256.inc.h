// Whole numbers beside sve256.inc.h.

// As many whole numbers of 32 bits, without sign, as a `Vector` has lanes.
struct Words {
  SveBits value;

  CXL_OFFLOAD_VECTOR static Words all(uint32_t value) { return {svdup_n_u32(value)}; }
  // Returns 0, 1, 2, ..., one number in each lane.
  CXL_OFFLOAD_VECTOR static Words count() { return {svindex_u32(0, 1)}; }
  CXL_OFFLOAD_VECTOR static Words load(const uint8_t* at) { return {svld1ub_u32(every(), at)}; }
  // Loads bytes and copies the highest bit of each into all bits above it.
  CXL_OFFLOAD_VECTOR static Words load_signed(const uint8_t* at) {
    return {svld1sb_u32(every(), reinterpret_cast<const int8_t*>(at))};
  }
  // Stores the low bytes.
  CXL_OFFLOAD_VECTOR void store(uint8_t* at) const { svst1b_u32(every(), at, value); }
  CXL_OFFLOAD_VECTOR uint32_t greatest() const { return svmaxv_u32(every(), value); }
};

CXL_OFFLOAD_VECTOR Words add(Words a, Words b) { return {svadd_u32_x(every(), a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words sub(Words a, Words b) { return {svsub_u32_x(every(), a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words mul(Words a, Words b) { return {svmul_u32_x(every(), a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words both(Words a, Words b) { return {svand_u32_x(every(), a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words either(Words a, Words b) {
  return {svorr_u32_x(every(), a.value, b.value)};
}
CXL_OFFLOAD_VECTOR Words differing(Words a, Words b) {
  return {sveor_u32_x(every(), a.value, b.value)};
}
CXL_OFFLOAD_VECTOR Words larger(Words a, Words b) {
  return {svmax_u32_x(every(), a.value, b.value)};
}
// Returns the bits of `a` where the mask has ones, and those of `b` elsewhere.
CXL_OFFLOAD_VECTOR Words chosen(Words mask, Words a, Words b) {
  return {svorr_u32_x(every(), svand_u32_x(every(), mask.value, a.value),
                      svbic_u32_x(every(), b.value, mask.value))};
}
template <int kBits>
CXL_OFFLOAD_VECTOR Words up(Words a) {
  return {svlsl_n_u32_x(every(), a.value, kBits)};
}
template <int kBits>
CXL_OFFLOAD_VECTOR Words down(Words a) {
  return {svlsr_n_u32_x(every(), a.value, kBits)};
}
CXL_OFFLOAD_VECTOR Words bits_of(Vector a) { return {svreinterpret_u32_f32(a.value)}; }
CXL_OFFLOAD_VECTOR Vector number_of(Words a) { return {svreinterpret_f32_u32(a.value)}; }
// Stores numbers as bfloat16. A number is rounded up where `noise`, of 16 bits, plus the 16 bits
// that bfloat16 has no room for carries into the bits above.
CXL_OFFLOAD_VECTOR void store_noisy(Vector a, Words noise, Bf16* at) {
  svst1h_u32(every(), &at->bits, svlsr_n_u32_x(every(), a.rounded(noise.value), 16));
}
