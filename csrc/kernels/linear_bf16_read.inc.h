// Reads weights as vectors of bfloat16. linear_bf16_avx512.cc and linear_tiles_amx.cc include this
// file inside of an unnamed namespace, after vector/avx512.inc.h.

constexpr size_t kBf16Lanes = 32;
// Code c is read as the number c + 16, because a shift turns its bits into that bfloat16.
constexpr float kCodeOffset = 16;

struct Codes {};  // two 4-bit codes a byte

// Tables of bytes for look-ups: the upper and the lower halves of numbers of bfloat16.
struct alignas(kLineBytes) Halves {
  uint8_t upper[128];
  uint8_t lower[128];
};

constexpr uint16_t kNanBf16 = 0x7fc0;

// Returns the bfloat16 of a magnitude: the 7 bits of a weight without its sign.
template <class W>
constexpr uint16_t bf16_of(uint8_t magnitude) {
  if constexpr (!std::is_same_v<W, E4m3>) return to_bf16(magnitude).bits;
  if (magnitude == 127) return kNanBf16;
  return to_bf16(to_float(E4m3{magnitude}) / kE4m3Unit).bits;
}

template <class W>
constexpr Halves halves_of() {
  Halves halves{};
  for (size_t i = 0; i < 128; ++i) {
    const uint16_t bits = bf16_of<W>(static_cast<uint8_t>(i));
    halves.upper[i] = static_cast<uint8_t>(bits >> 8);
    halves.lower[i] = static_cast<uint8_t>(bits & 0xff);
  }
  return halves;
}

template <class W>
constexpr Halves kHalves = halves_of<W>();

// Makes kVectors vectors of bfloat16 from 64 bytes of weights. arrange() puts as many numbers of x
// into the same order. A weight of one byte gets its magnitude from a table and keeps its sign bit.
template <class W>
struct Bf16Reader {
  static constexpr size_t kVectors = 2;
  // Interleaving keeps eight neighbours together.
  static void arrange(const Bf16* from, Bf16* to) {
    for (size_t i = 0; i < 8; ++i) std::memcpy(to + i / 2 * 8 + i % 2 * 32, from + i * 8, 16);
  }

  CXL_OFFLOAD_VECTOR Bf16Reader() {
    for (size_t i = 0; i < 2; ++i) {
      upper[i] = _mm512_load_si512(kHalves<W>.upper + sizeof(__m512i) * i);
      lower[i] = _mm512_load_si512(kHalves<W>.lower + sizeof(__m512i) * i);
    }
  }
  CXL_OFFLOAD_VECTOR void read(__m512i weights, __m512i* to) const {
    __m512i magnitudes = weights;
    if constexpr (std::is_same_v<W, int8_t>) magnitudes = _mm512_abs_epi8(weights);
    const __m512i low = _mm512_permutex2var_epi8(lower[0], magnitudes, lower[1]);
    __m512i high = _mm512_permutex2var_epi8(upper[0], magnitudes, upper[1]);
    if constexpr (std::is_same_v<W, int8_t>) {  // -128 has a magnitude beyond the table
      const __mmask64 least = _mm512_movepi8_mask(magnitudes);
      high = _mm512_mask_mov_epi8(high, least, _mm512_set1_epi8(0x43));
    }
    // high | (weights & sign)
    high = _mm512_ternarylogic_epi32(high, weights, _mm512_set1_epi8(-128), 0xf8);
    to[0] = _mm512_unpacklo_epi8(low, high);
    to[1] = _mm512_unpackhi_epi8(low, high);
  }

  __m512i upper[2];
  __m512i lower[2];
};
template <>
struct Bf16Reader<Bf16> {
  static constexpr size_t kVectors = 1;
  static void arrange(const Bf16* from, Bf16* to) { std::memcpy(to, from, sizeof(__m512i)); }
  CXL_OFFLOAD_VECTOR void read(__m512i weights, __m512i* to) const { to[0] = weights; }
};

// A number of float16 is the sum of two numbers of bfloat16: its upper part has the first eight
// bits of the fraction, its lower part the other three. An infinity or NaN has NaN for its lower
// part.
struct F16Parts {
  CXL_OFFLOAD_VECTOR explicit F16Parts(__m512 number) {
    const __m512i kept = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    upper = _mm512_and_si512(_mm512_castps_si512(number), kept);
    lower = _mm512_castps_si512(_mm512_sub_ps(number, _mm512_castsi512_ps(upper)));
  }

  __m512i upper;  // of 16 numbers, in the upper halves of 32 bits; the lower halves are zero
  __m512i lower;
};

// Makes two vectors of a line: the upper parts of its 32 weights, and the lower parts.
template <>
struct Bf16Reader<F16> {
  static constexpr size_t kVectors = 2;
  // The two halves of a line take turns.
  static void arrange(const Bf16* from, Bf16* to) {
    alignas(kLineBytes) uint16_t places[32];
    for (size_t i = 0; i < 32; ++i) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
    _mm512_storeu_si512(
        to, _mm512_permutexvar_epi16(_mm512_load_si512(places), _mm512_loadu_si512(from)));
  }

  CXL_OFFLOAD_VECTOR void read(__m512i weights, __m512i* to) const {
    const F16Parts first(_mm512_cvtph_ps(_mm512_castsi512_si256(weights)));
    const F16Parts second(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(weights, 1)));
    to[0] = _mm512_or_si512(_mm512_srli_epi32(first.upper, 16), second.upper);
    to[1] = _mm512_or_si512(_mm512_srli_epi32(first.lower, 16), second.lower);
  }
};

// How many numbers of bfloat16 a weight is the sum of, and how many weights a line has.
template <class W>
constexpr size_t kWeightParts = std::is_same_v<W, F16> ? 2 : 1;
template <class W>
constexpr size_t kBlockWeights = Bf16Reader<W>::kVectors / kWeightParts<W> * kBf16Lanes;

// Every 16 bits hold four codes of a row. From the lowest bits up they are the second, the first,
// the fourth and the third code. A bfloat16 from 16 to 31 is 16 plus the upper four bits of its
// fraction. So a code that is shifted to these bits becomes the number code + 16.
template <>
struct Bf16Reader<Codes> {
  static constexpr size_t kVectors = 4;
  static void arrange(const Bf16* from, Bf16* to) {
    __m512i parts[4];
    for (size_t i = 0; i < 4; ++i) parts[i] = _mm512_loadu_si512(from + i * kBf16Lanes);
    alignas(kLineBytes) uint16_t fourths[32];
    for (size_t i = 0; i < 32; ++i) fourths[i] = static_cast<uint16_t>(i * 4 % 64);
    for (size_t n = 0; n < 4; ++n) {
      const __m512i order =
          _mm512_add_epi16(_mm512_load_si512(fourths), _mm512_set1_epi16(short(n ^ 1)));
      const __m512i low = _mm512_permutex2var_epi16(parts[0], order, parts[1]);
      const __m512i high = _mm512_permutex2var_epi16(parts[2], order, parts[3]);
      _mm512_storeu_si512(to + n * kBf16Lanes, _mm512_mask_mov_epi64(low, 0xf0, high));
    }
  }

  CXL_OFFLOAD_VECTOR void read(__m512i weights, __m512i* to) const {
    to[0] = number(_mm512_slli_epi16(weights, 3));
    to[1] = number(_mm512_srli_epi16(weights, 1));
    to[2] = number(_mm512_srli_epi16(weights, 5));
    to[3] = number(_mm512_srli_epi16(weights, 9));
  }
  CXL_OFFLOAD_VECTOR static __m512i number(__m512i shifted) {
    // sixteen | (shifted & code)
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x4180), shifted, _mm512_set1_epi16(0x78),
                                     0xf8);
  }
};

// Writes a row of x in the order of the weights, and zeros to the end of the last block.
template <class W>
void prepare_row(const std::byte* from, size_t width, Bf16* arranged) {
  constexpr size_t kBlock = kBlockWeights<W>;
  const Bf16* numbers = reinterpret_cast<const Bf16*>(from);
  size_t at = 0;
  for (; at + kBlock <= width; at += kBlock) Bf16Reader<W>::arrange(numbers + at, arranged + at);
  if (at == width) return;
  Bf16 last[kBlock] = {};
  std::memcpy(last, numbers + at, (width - at) * sizeof(Bf16));
  Bf16Reader<W>::arrange(last, arranged + at);
}
