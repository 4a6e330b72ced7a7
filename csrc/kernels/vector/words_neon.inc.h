// Whole numbers beside neon.inc.h.

// As many whole numbers of 32 bits, without sign, as a `Vector` has lanes.
struct Words {
  uint32x4_t value;

  CXL_OFFLOAD_VECTOR static Words all(uint32_t value) { return {vdupq_n_u32(value)}; }
  // Returns 0, 1, 2, ..., one number in each lane.
  CXL_OFFLOAD_VECTOR static Words count() {
    const uint32_t lanes[4] = {0, 1, 2, 3};
    return {vld1q_u32(lanes)};
  }
  CXL_OFFLOAD_VECTOR static Words load(const uint8_t* at) {
    return {vmovl_u16(vget_low_u16(vmovl_u8(Vector::four_bytes(at))))};
  }
  // Loads bytes and copies the highest bit of each into all bits above it.
  CXL_OFFLOAD_VECTOR static Words load_signed(const uint8_t* at) {
    return {vreinterpretq_u32_s32(
        vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(Vector::four_bytes(at))))))};
  }
  // Stores the low bytes.
  CXL_OFFLOAD_VECTOR void store(uint8_t* at) const {
    const uint16x4_t words = vmovn_u32(value);
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
    const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    std::memcpy(at, &four, sizeof(four));
  }
  CXL_OFFLOAD_VECTOR uint32_t greatest() const { return vmaxvq_u32(value); }
};

CXL_OFFLOAD_VECTOR Words add(Words a, Words b) { return {vaddq_u32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words sub(Words a, Words b) { return {vsubq_u32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words mul(Words a, Words b) { return {vmulq_u32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words both(Words a, Words b) { return {vandq_u32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words either(Words a, Words b) { return {vorrq_u32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words differing(Words a, Words b) { return {veorq_u32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Words larger(Words a, Words b) { return {vmaxq_u32(a.value, b.value)}; }
// Returns the bits of `a` where the mask has ones, and those of `b` elsewhere.
CXL_OFFLOAD_VECTOR Words chosen(Words mask, Words a, Words b) {
  return {vbslq_u32(mask.value, a.value, b.value)};
}
template <int kBits>
CXL_OFFLOAD_VECTOR Words up(Words a) {
  return {vshlq_n_u32(a.value, kBits)};
}
template <int kBits>
CXL_OFFLOAD_VECTOR Words down(Words a) {
  return {vshrq_n_u32(a.value, kBits)};
}
CXL_OFFLOAD_VECTOR Words bits_of(Vector a) { return {vreinterpretq_u32_f32(a.value)}; }
CXL_OFFLOAD_VECTOR Vector number_of(Words a) { return {vreinterpretq_f32_u32(a.value)}; }
// Stores numbers as bfloat16. A number is rounded up where `noise`, of 16 bits, plus the 16 bits
// that bfloat16 has no room for carries into the bits above.
CXL_OFFLOAD_VECTOR void store_noisy(Vector a, Words noise, Bf16* at) {
  vst1_u16(&at->bits, vshrn_n_u32(a.rounded(noise.value), 16));
}
