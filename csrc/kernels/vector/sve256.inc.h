// Eight numbers in a register of Arm's SVE, on processors whose vectors have 256 bits.

typedef svfloat32_t SveFloats __attribute__((arm_sve_vector_bits(256)));
typedef svuint32_t SveBits __attribute__((arm_sve_vector_bits(256)));

// All lanes of 32 bits.
CXL_OFFLOAD_VECTOR svbool_t every() { return svptrue_b32(); }

struct Vector {
  static constexpr size_t kLanes = 8;
  static constexpr size_t kRegisters = 32;
  template <class T>
  using NoNan = T;
  SveFloats value;

  CXL_OFFLOAD_VECTOR static Vector all(float value) { return {svdup_n_f32(value)}; }
  // Returns `first` in the lower lanes and `second` in the upper ones.
  CXL_OFFLOAD_VECTOR static Vector halves(float first, float second) {
    return {svsel_f32(svptrue_pat_b32(SV_VL4), svdup_n_f32(first), svdup_n_f32(second))};
  }
  template <class T>
  CXL_OFFLOAD_VECTOR static Vector load(const T* at) {
    return load_lanes(every(), at);
  }
  // Loads `count` elements and puts zeros into the other lanes. It reads no memory beyond them.
  template <class T>
  CXL_OFFLOAD_VECTOR static Vector load_some(const T* at, size_t count) {
    return load_lanes(svwhilelt_b32_u64(0, count), at);
  }

  CXL_OFFLOAD_VECTOR void store(float* at) const { svst1_f32(every(), at, value); }
  CXL_OFFLOAD_VECTOR void store(Bf16* at) const {
    svst1h_u32(every(), &at->bits, svlsr_n_u32_x(every(), rounded(), 16));
  }
  CXL_OFFLOAD_VECTOR void store(F16* at) const {
    svst1h_u32(every(), &at->bits, svreinterpret_u32_f16(svcvt_f16_f32_x(every(), value)));
  }
  // Stores past the caches cannot narrow, and nobody has measured whether others would pay here.
  template <class T>
  CXL_OFFLOAD_VECTOR void stream(T* at) const {
    store(at);
  }
  CXL_OFFLOAD_VECTOR static void wait_for_stores() {}

  // Loads the even elements into one vector and the odd ones into another, which needs no shuffle.
  CXL_OFFLOAD_VECTOR static void load_pair(const Bf16* at, Vector& even, Vector& odd) {
    const SveBits both = svreinterpret_u32_u16(svld1_u16(svptrue_b16(), &at->bits));
    even = {svreinterpret_f32_u32(svlsl_n_u32_x(every(), both, 16))};
    odd = {svreinterpret_f32_u32(svand_n_u32_x(every(), both, 0xffff0000u))};
  }
  CXL_OFFLOAD_VECTOR static void store_pair(Bf16* at, Vector even, Vector odd) {
    // Takes the upper half of each lane, in turns from both.
    svst1_u16(
        svptrue_b16(), &at->bits,
        svtrn2_u16(svreinterpret_u16_u32(even.rounded()), svreinterpret_u16_u32(odd.rounded())));
  }

  CXL_OFFLOAD_VECTOR float total() const { return svaddv_f32(every(), value); }
  CXL_OFFLOAD_VECTOR float greatest() const { return svmaxv_f32(every(), value); }
  // Writes the totals of four vectors. It takes fewer steps than one total at a time.
  CXL_OFFLOAD_VECTOR static void totals(const Vector* four, float* to) {
    const SveFloats low = neighbours(four[0].value, four[1].value);
    const SveFloats all = neighbours(low, neighbours(four[2].value, four[3].value));
    svst1_f32(svptrue_pat_b32(SV_VL4), to, neighbours(all, all));
  }

  // Returns the sums of neighbours: first those of `a`, then those of `b`.
  CXL_OFFLOAD_VECTOR static SveFloats neighbours(SveFloats a, SveFloats b) {
    return svadd_f32_x(every(), svuzp1_f32(a, b), svuzp2_f32(a, b));
  }

  // Load the elements of some lanes, and put zeros into the others.
  CXL_OFFLOAD_VECTOR static Vector load_lanes(svbool_t lanes, const float* at) {
    return {svld1_f32(lanes, at)};
  }
  CXL_OFFLOAD_VECTOR static Vector load_lanes(svbool_t lanes, const Bf16* at) {
    const SveBits wide = svld1uh_u32(lanes, &at->bits);
    return {svreinterpret_f32_u32(svlsl_n_u32_x(every(), wide, 16))};
  }
  CXL_OFFLOAD_VECTOR static Vector load_lanes(svbool_t lanes, const F16* at) {
    return from_half(svld1uh_u32(lanes, &at->bits));
  }
  // Converts as to_float() does, but leaves out the last factor. A number that was widened with its
  // sign has the sign in bit 15 after the shift.
  CXL_OFFLOAD_VECTOR static Vector load_lanes(svbool_t lanes, const E4m3* at) {
    const SveBits wide = svld1sb_u32(lanes, reinterpret_cast<const int8_t*>(at));
    const SveBits small = svand_n_u32_x(every(), svlsl_n_u32_x(every(), wide, 7), 0xbf80);
    const SveBits nan = svand_n_u32_x(every(), svadd_n_u32_x(every(), small, 0x80), 0x4000);
    return from_half(svorr_u32_x(every(), small, nan));
  }
  CXL_OFFLOAD_VECTOR static Vector load_lanes(svbool_t lanes, const E5m2* at) {
    return from_half(svlsl_n_u32_x(every(), svld1ub_u32(lanes, &at->bits), 8));
  }
  CXL_OFFLOAD_VECTOR static Vector load_lanes(svbool_t lanes, const int8_t* at) {
    return {svcvt_f32_s32_x(every(), svld1sb_s32(lanes, at))};
  }

  // Converts the lower half of each lane.
  CXL_OFFLOAD_VECTOR static Vector from_half(SveBits bits) {
    return {svcvt_f32_f16_x(every(), svreinterpret_f16_u32(bits))};
  }
  // Returns numbers whose high halves are the nearest bfloat16, with ties to even. A NaN stays a
  // NaN and becomes a quiet one.
  CXL_OFFLOAD_VECTOR SveBits rounded() const {
    const SveBits high = svlsr_n_u32_x(every(), svreinterpret_u32_f32(value), 16);
    return rounded(svadd_n_u32_x(every(), svand_n_u32_x(every(), high, 1), 0x7fff));
  }
  // Adds bits below the high halves, which decide whether the high halves are rounded up.
  CXL_OFFLOAD_VECTOR SveBits rounded(SveBits added) const {
    const SveBits bits = svreinterpret_u32_f32(value);
    const SveBits near = svadd_u32_x(every(), bits, added);
    const SveBits quiet = svorr_n_u32_x(every(), bits, 0x400000);
    return svsel_u32(svcmpuo_f32(every(), value, value), quiet, near);
  }
};

CXL_OFFLOAD_VECTOR Vector add(Vector a, Vector b) {
  return {svadd_f32_x(every(), a.value, b.value)};
}
CXL_OFFLOAD_VECTOR Vector mul(Vector a, Vector b) {
  return {svmul_f32_x(every(), a.value, b.value)};
}
CXL_OFFLOAD_VECTOR Vector div(Vector a, Vector b) {
  return {svdiv_f32_x(every(), a.value, b.value)};
}
// Multiplies and adds, and rounds once on every processor.
CXL_OFFLOAD_VECTOR Vector fma(Vector a, Vector b, Vector c) {
  return {svmla_f32_x(every(), c.value, a.value, b.value)};
}
// Multiplies and adds. It rounds once where the processor has an instruction for that, else twice.
CXL_OFFLOAD_VECTOR Vector mul_add(Vector a, Vector b, Vector c) { return fma(a, b, c); }
CXL_OFFLOAD_VECTOR Vector root(Vector a) { return {svsqrt_f32_x(every(), a.value)}; }
// Returns 1, -1, or the value itself when it is a zero or a NaN.
CXL_OFFLOAD_VECTOR Vector sign(Vector a) {
  const svbool_t either = svacgt_n_f32(every(), a.value, 0);
  const SveBits signs = svand_n_u32_x(every(), svreinterpret_u32_f32(a.value), 0x80000000u);
  const SveBits signed_one = svorr_n_u32_x(every(), signs, 0x3f800000);
  return {svsel_f32(either, svreinterpret_f32_u32(signed_one), a.value)};
}
// Returns the larger of two numbers, and the second one when either is a NaN.
CXL_OFFLOAD_VECTOR Vector larger(Vector a, Vector b) {
  return {svsel_f32(svcmpgt_f32(every(), a.value, b.value), a.value, b.value)};
}

// Returns the exponential of numbers that are not above zero. Results below the normal numbers
// become zero. A NaN stays a NaN.
CXL_OFFLOAD_VECTOR Vector exponential(Vector a) {
  const float least = -87.3f;
  const SveFloats x = svmax_n_f32_x(every(), a.value, least);
  const SveFloats n = svrintn_f32_x(every(), svmul_n_f32_x(every(), x, 1.44269504f));
  // The logarithm of 2 in two parts, so that the rest is exact.
  SveFloats rest = svmls_n_f32_x(every(), x, n, 0.693359375f);
  rest = svmls_n_f32_x(every(), rest, n, -2.12194440e-4f);
  SveFloats sum = svdup_n_f32(1.0f / 5040);  // Taylor's series, for a rest of at most 0.35
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = svmla_f32_x(every(), svdup_n_f32(term), sum, rest);
  }
  const SveFloats result = svscale_f32_x(every(), sum, svcvt_s32_f32_x(every(), n));
  return {svsel_f32(svcmplt_n_f32(every(), a.value, least), svdup_n_f32(0), result)};
}

// Loads pairs of scales as (step, low). `left` elements are left of the row of pairs.
CXL_OFFLOAD_VECTOR Vector load_pairs(const F16* at, size_t left, GroupScales form) {
  const SveFloats pairs = Vector::load_some(at, left).value;
  const svbool_t firsts = svptrue_b64();  // every second lane of 32 bits
  if (form == GroupScales::kInverseLow) return {svdivr_n_f32_m(firsts, pairs, 1)};
  const SveFloats turned =
      svreinterpret_f32_u64(svrevw_u64_x(svptrue_b64(), svreinterpret_u64_f32(pairs)));
  if (form == GroupScales::kLowStep) return {turned};
  const SveFloats low = svneg_f32_x(every(), svmul_f32_x(every(), turned, pairs));
  return {svsel_f32(firsts, turned, low)};
}

// Loads words of two bytes of 4-bit codes, one word into each lane.
CXL_OFFLOAD_VECTOR SveBits load_words(const std::byte* at) {
  return svld1uh_u32(every(), reinterpret_cast<const uint16_t*>(at));
}

// Loads words of eight 4-bit codes, one word into each lane.
CXL_OFFLOAD_VECTOR SveBits load_eights(const std::byte* at) {
  return svreinterpret_u32_u8(svld1_u8(svptrue_b8(), reinterpret_cast<const uint8_t*>(at)));
}

// Returns the codes that begin at bit kShift of each word, times 2^kShift.
template <int kShift>
CXL_OFFLOAD_VECTOR Vector shifted_code(SveBits words) {
  const SveBits code = svand_n_u32_x(every(), words, 15u << kShift);
  return {svcvt_f32_u32_x(every(), code)};
}
// Returns the codes in the highest four bits of each word.
CXL_OFFLOAD_VECTOR Vector top_code(SveBits words) {
  return {svcvt_f32_u32_x(every(), svlsr_n_u32_x(every(), words, 28))};
}

// The numbers that the codes of a group stand for.
struct Table {
  Table() = default;
  CXL_OFFLOAD_VECTOR Table(float step, float low)
      : step(svdup_n_f32(step)), low(svdup_n_f32(low)) {}
  template <int kShift>
  CXL_OFFLOAD_VECTOR Vector number(SveBits codes) const {
    SveBits code = codes;
    if constexpr (kShift > 0) code = svlsr_n_u32_x(every(), codes, kShift);
    code = svand_n_u32_x(every(), code, 15);
    return {svmla_f32_x(every(), low, svcvt_f32_u32_x(every(), code), step)};
  }

  SveFloats step;
  SveFloats low;
};
