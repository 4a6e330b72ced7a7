// Arranges rows of x in tiles. linear_tiles_amx.cc includes this file inside of an unnamed
// namespace, after linear_bf16_read.inc.h; linear_tiles.inc.h says what a tile of x is.

constexpr size_t kTileOutputs = 16;

// Transposes 16 x 16 numbers of 32 bits.
CXL_OFFLOAD_VECTOR void transpose(__m512i (&rows)[16]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
  for (int step = 1; step < 16; step *= 2) {
    const __m512i by = _mm512_set1_epi32(step);
    const __mmask16 odd = _mm512_test_epi32_mask(lane, by);
    const __m512i of_second = _mm512_add_epi32(lane, _mm512_set1_epi32(16));
    const __m512i first = _mm512_mask_sub_epi32(lane, odd, of_second, by);
    const __m512i second = _mm512_mask_mov_epi32(_mm512_add_epi32(lane, by), odd, of_second);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if ((i & step) != 0) continue;
      const __m512i a = rows[i], b = rows[i + step];
      rows[i] = _mm512_permutex2var_epi32(a, first, b);
      rows[i + step] = _mm512_permutex2var_epi32(a, second, b);
    }
  }
}

// Writes two columns of each row of a tile, then the next two columns of each. The number of pairs
// is a multiple of 16.
CXL_OFFLOAD_VECTOR void pair_rows(const Bf16* from, size_t step, size_t rows, size_t pairs,
                                  Bf16* to) {
  const auto there = static_cast<__mmask16>((1U << rows) - 1);
  for (size_t at = 0; at < pairs; at += kTileOutputs) {
    __m512i columns[kTileOutputs];
#pragma GCC unroll 16
    for (size_t i = 0; i < kTileOutputs; ++i) {
      columns[i] = i < rows ? _mm512_loadu_si512(from + i * step + 2 * at) : _mm512_setzero_si512();
    }
    transpose(columns);
#pragma GCC unroll 16
    for (size_t i = 0; i < kTileOutputs; ++i) {
      _mm512_mask_storeu_epi32(to + 2 * (at + i) * rows, there, columns[i]);
    }
  }
}

// Writes the upper and the lower parts of numbers of float16.
inline void take_parts(const F16* from, size_t width, Bf16* upper, Bf16* lower) {
  for (size_t at = 0; at < width; at += kTileOutputs) {
    const auto there =
        static_cast<__mmask16>((1U << std::min(width - at, size_t{kTileOutputs})) - 1);
    const F16Parts parts(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, from + at)));
    const auto put = [&](__m512i numbers, Bf16* to) {
      _mm256_mask_storeu_epi16(to + at, there,
                               _mm512_cvtepi32_epi16(_mm512_srli_epi32(numbers, 16)));
    };
    put(parts.upper, upper);
    put(parts.lower, lower);
  }
}

// Writes the parts of a row of float16 in the order of weights of float16, which have both parts,
// too.
CXL_OFFLOAD_VECTOR void split_row(const std::byte* from, size_t width, Bf16* upper, Bf16* lower) {
  const Bf16Reader<F16> reader;
  for (size_t at = 0; at < width; at += kBf16Lanes) {
    const auto there =
        static_cast<__mmask32>(~uint32_t{0} >> (kBf16Lanes - std::min(width - at, kBf16Lanes)));
    __m512i parts[2];
    reader.read(_mm512_maskz_loadu_epi16(there, from + at * sizeof(F16)), parts);
    _mm512_storeu_si512(upper + at, parts[0]);
    _mm512_storeu_si512(lower + at, parts[1]);
  }
}

// Arranges the X parts of a row. The second is written `step` numbers after the first.
template <class W, size_t X>
void arrange_row(const std::byte* from, size_t width, Bf16* parts, Bf16* to, size_t step) {
  if constexpr (X == 1) {
    prepare_row<W>(from, width, to);
  } else if constexpr (std::is_same_v<W, F16>) {
    split_row(from, width, to, to + step);
  } else {
    take_parts(reinterpret_cast<const F16*>(from), width, parts, parts + width);
    for (size_t part = 0; part < X; ++part) {
      prepare_row<W>(reinterpret_cast<const std::byte*>(parts + part * width), width,
                     to + part * step);
    }
  }
}

template <class W, size_t X>
void prepare(const LinearInput& input) {
  const size_t width = round_up(input.width, kLinearPad);
  const size_t step = input.tile * width;
  const auto parts = std::make_unique_for_overwrite<Bf16[]>(X * width);
  // A tile of a single row needs no other order.
  const auto rows = std::make_unique<Bf16[]>(input.tile == 1 ? 0 : X * step);
  for (size_t row = 0; row < input.rows; row += input.tile) {
    Bf16* to = reinterpret_cast<Bf16*>(input.to + row * input.to_step);
    const size_t count = std::min(input.tile, input.rows - row);
    for (size_t i = 0; i < count; ++i) {
      const std::byte* from = input.x + static_cast<ptrdiff_t>(row + i) * input.x_step;
      Bf16* arranged = input.tile == 1 ? to : rows.get() + i * width;
      arrange_row<W, X>(from, input.width, parts.get(), arranged, step);
    }
    if (input.tile == 1) continue;
    for (size_t part = 0; part < X; ++part) {
      Bf16* tile = rows.get() + part * step;
      std::fill(tile + count * width, tile + step, Bf16{});
      pair_rows(tile, width, input.tile, width / 2, to + part * step);
    }
  }
}
