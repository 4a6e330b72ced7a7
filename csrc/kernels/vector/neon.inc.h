// Four numbers in a register of Arm's Advanced SIMD (NEON), which every AArch64 processor has.

struct Vector {
  static constexpr size_t kLanes = 4;
  static constexpr size_t kRegisters = 32;
  template <class T>
  using NoNan = T;
  float32x4_t value;

  CXL_OFFLOAD_VECTOR static Vector all(float value) { return {vdupq_n_f32(value)}; }
  // Returns `first` in the lower lanes and `second` in the upper ones.
  CXL_OFFLOAD_VECTOR static Vector halves(float first, float second) {
    return {vcombine_f32(vdup_n_f32(first), vdup_n_f32(second))};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const float* at) { return {vld1q_f32(at)}; }
  CXL_OFFLOAD_VECTOR static Vector load(const Bf16* at) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&at->bits), 16))};
  }
  CXL_OFFLOAD_VECTOR static Vector load(const F16* at) { return from_half(vld1_u16(&at->bits)); }
  // Converts as to_float() does, but leaves out the last factor. A number that was widened with its
  // sign has the sign in bit 15 after the shift.
  CXL_OFFLOAD_VECTOR static Vector load(const E4m3* at) {
    const int16x4_t wide = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(at))));
    const uint16x4_t small =
        vand_u16(vreinterpret_u16_s16(vshl_n_s16(wide, 7)), vdup_n_u16(0xbf80));
    const uint16x4_t nan = vand_u16(vadd_u16(small, vdup_n_u16(0x80)), vdup_n_u16(0x4000));
    return from_half(vorr_u16(small, nan));
  }
  CXL_OFFLOAD_VECTOR static Vector load(const E5m2* at) {
    return from_half(vget_low_u16(vshll_n_u8(four_bytes(at), 8)));
  }
  CXL_OFFLOAD_VECTOR static Vector load(const int8_t* at) {
    const int16x4_t wide = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(at))));
    return {vcvtq_f32_s32(vmovl_s16(wide))};
  }
  // Loads `count` elements and puts zeros into the other lanes. It reads no memory beyond them.
  template <class T>
  CXL_OFFLOAD_VECTOR static Vector load_some(const T* at, size_t count) {
    T some[kLanes] = {};
    std::memcpy(some, at, count * sizeof(T));
    return load(some);
  }

  CXL_OFFLOAD_VECTOR void store(float* at) const { vst1q_f32(at, value); }
  CXL_OFFLOAD_VECTOR void store(Bf16* at) const { vst1_u16(&at->bits, vshrn_n_u32(rounded(), 16)); }
  CXL_OFFLOAD_VECTOR void store(F16* at) const {
    vst1_u16(&at->bits, vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }
  // There is no store past the caches that pays here.
  template <class T>
  CXL_OFFLOAD_VECTOR void stream(T* at) const {
    store(at);
  }
  CXL_OFFLOAD_VECTOR static void wait_for_stores() {}

  // Loads the even elements into one vector and the odd ones into another, which needs no shuffle.
  CXL_OFFLOAD_VECTOR static void load_pair(const Bf16* at, Vector& even, Vector& odd) {
    const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(&at->bits));
    even = {vreinterpretq_f32_u32(vshlq_n_u32(both, 16))};
    odd = {vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)))};
  }
  CXL_OFFLOAD_VECTOR static void store_pair(Bf16* at, Vector even, Vector odd) {
    // Puts the even halves below the odd ones.
    const uint32x4_t both = vsriq_n_u32(odd.rounded(), even.rounded(), 16);
    vst1q_u16(&at->bits, vreinterpretq_u16_u32(both));
  }

  CXL_OFFLOAD_VECTOR float total() const { return vaddvq_f32(value); }
  CXL_OFFLOAD_VECTOR float greatest() const { return vmaxvq_f32(value); }
  CXL_OFFLOAD_VECTOR static void totals(const Vector* four, float* to) {
    const float32x4_t low = vpaddq_f32(four[0].value, four[1].value);
    vst1q_f32(to, vpaddq_f32(low, vpaddq_f32(four[2].value, four[3].value)));
  }

  template <class T>
  CXL_OFFLOAD_VECTOR static uint8x8_t four_bytes(const T* at) {
    uint32_t bytes;
    std::memcpy(&bytes, at, sizeof(bytes));
    return vreinterpret_u8_u32(vdup_n_u32(bytes));
  }
  CXL_OFFLOAD_VECTOR static Vector from_half(uint16x4_t bits) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(bits))};
  }
  // Returns numbers whose high halves are the nearest bfloat16, with ties to even. A NaN stays a
  // NaN and becomes a quiet one.
  CXL_OFFLOAD_VECTOR uint32x4_t rounded() const {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return rounded(vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  }
  // Adds bits below the high halves, which decide whether the high halves are rounded up.
  CXL_OFFLOAD_VECTOR uint32x4_t rounded(uint32x4_t added) const {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t near = vaddq_u32(bits, added);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vbslq_u32(vceqq_f32(value, value), near, quiet);
  }
};

CXL_OFFLOAD_VECTOR Vector add(Vector a, Vector b) { return {vaddq_f32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector mul(Vector a, Vector b) { return {vmulq_f32(a.value, b.value)}; }
CXL_OFFLOAD_VECTOR Vector div(Vector a, Vector b) { return {vdivq_f32(a.value, b.value)}; }
// Multiplies and adds, and rounds once on every processor.
CXL_OFFLOAD_VECTOR Vector fma(Vector a, Vector b, Vector c) {
  return {vfmaq_f32(c.value, a.value, b.value)};
}
// Multiplies and adds. It rounds once where the processor has an instruction for that, else twice.
CXL_OFFLOAD_VECTOR Vector mul_add(Vector a, Vector b, Vector c) { return fma(a, b, c); }
CXL_OFFLOAD_VECTOR Vector root(Vector a) { return {vsqrtq_f32(a.value)}; }
// Returns 1, -1, or the value itself when it is a zero or a NaN.
CXL_OFFLOAD_VECTOR Vector sign(Vector a) {
  const uint32x4_t zero = vceqzq_f32(a.value);
  const uint32x4_t same = vorrq_u32(zero, vmvnq_u32(vceqq_f32(a.value, a.value)));
  const uint32x4_t signs = vdupq_n_u32(0x80000000u);
  return {vbslq_f32(same, a.value, vbslq_f32(signs, a.value, vdupq_n_f32(1)))};
}
// Returns the larger of two numbers, and the second one when either is a NaN.
CXL_OFFLOAD_VECTOR Vector larger(Vector a, Vector b) {
  return {vbslq_f32(vcgtq_f32(a.value, b.value), a.value, b.value)};
}

// Returns the exponential of numbers that are not above zero. Results below the normal numbers
// become zero. A NaN stays a NaN.
CXL_OFFLOAD_VECTOR Vector exponential(Vector a) {
  const float32x4_t least = vdupq_n_f32(-87.3f);
  const float32x4_t x = vmaxq_f32(least, a.value);
  const float32x4_t n = vrndnq_f32(vmulq_f32(x, vdupq_n_f32(1.44269504f)));
  // The logarithm of 2 in two parts, so that the rest is exact.
  float32x4_t rest = vfmsq_f32(x, n, vdupq_n_f32(0.693359375f));
  rest = vfmsq_f32(rest, n, vdupq_n_f32(-2.12194440e-4f));
  float32x4_t sum = vdupq_n_f32(1.0f / 5040);  // Taylor's series, for a rest of at most 0.35
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = vfmaq_f32(vdupq_n_f32(term), sum, rest);
  }
  const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  const float32x4_t power = vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
  const uint32x4_t tiny = vcltq_f32(a.value, least);
  return {vbslq_f32(tiny, vdupq_n_f32(0), vmulq_f32(sum, power))};
}

// Loads pairs of scales as (step, low). `left` elements are left of the row of pairs.
CXL_OFFLOAD_VECTOR Vector load_pairs(const F16* at, size_t left, GroupScales form) {
  const bool whole = left >= Vector::kLanes;
  const float32x4_t pairs = (whole ? Vector::load(at) : Vector::load_some(at, left)).value;
  const uint32x4_t firsts = vreinterpretq_u32_u64(vdupq_n_u64(0xffffffffu));
  if (form == GroupScales::kInverseLow) {
    return {vbslq_f32(firsts, vdivq_f32(vdupq_n_f32(1), pairs), pairs)};
  }
  const float32x4_t turned = vrev64q_f32(pairs);
  if (form == GroupScales::kLowStep) return {turned};
  return {vbslq_f32(firsts, turned, vnegq_f32(vmulq_f32(turned, pairs)))};
}

// Loads words of two bytes of 4-bit codes, one word into each lane.
CXL_OFFLOAD_VECTOR uint32x4_t load_words(const std::byte* at) {
  return vmovl_u16(vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(at))));
}

// Loads words of eight 4-bit codes, one word into each lane.
CXL_OFFLOAD_VECTOR uint32x4_t load_eights(const std::byte* at) {
  return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(at)));
}

// Returns the codes that begin at bit kShift of each word, times 2^kShift.
template <int kShift>
CXL_OFFLOAD_VECTOR Vector shifted_code(uint32x4_t words) {
  return {vcvtq_f32_u32(vandq_u32(words, vdupq_n_u32(15u << kShift)))};
}
// Returns the codes in the highest four bits of each word.
CXL_OFFLOAD_VECTOR Vector top_code(uint32x4_t words) {
  return {vcvtq_f32_u32(vshrq_n_u32(words, 28))};
}

// The numbers that the codes of a group stand for.
struct Table {
  Table() = default;
  CXL_OFFLOAD_VECTOR Table(float step, float low)
      : step(vdupq_n_f32(step)), low(vdupq_n_f32(low)) {}
  template <int kShift>
  CXL_OFFLOAD_VECTOR Vector number(uint32x4_t codes) const {
    uint32x4_t code = codes;
    if constexpr (kShift > 0) code = vshrq_n_u32(codes, kShift);
    code = vandq_u32(code, vdupq_n_u32(15));
    return {vfmaq_f32(low, vcvtq_f32_u32(code), step)};
  }

  float32x4_t step;
  float32x4_t low;
};
