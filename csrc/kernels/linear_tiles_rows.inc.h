// Arranges rows of x in tiles. linear_tiles_amx.cc includes this file inside of an unnamed
// namespace, after linear_bf16_read.inc.h; linear_tiles.inc.h says what a tile of x is.

constexpr size_t kTileOutputs = 16;

// Writes two columns of each row of a tile, then the next two columns of each.
inline void pair_rows(const Bf16* from, size_t step, size_t rows, size_t pairs, Bf16* to) {
  const auto height = static_cast<int32_t>(step / 2);
  const __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i places = _mm512_mullo_epi32(index, _mm512_set1_epi32(height));
  const auto there = static_cast<__mmask16>((1U << rows) - 1);
  for (size_t at = 0; at < pairs; ++at) {
    const __m512i pair = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, places,
                                                     from + 2 * at, sizeof(int32_t));
    _mm512_mask_storeu_epi32(to + 2 * at * rows, there, pair);
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

// Arranges the X parts of a row. The second is written `step` numbers after the first.
template <class W, size_t X>
void arrange_row(const std::byte* from, size_t width, Bf16* parts, Bf16* to, size_t step) {
  if constexpr (X == 1) {
    prepare_row<W>(from, width, to);
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
