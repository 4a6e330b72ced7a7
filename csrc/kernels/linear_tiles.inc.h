// Linear layers by tiles of bfloat16 (AMX), for x of bfloat16. linear_tiles_amx.cc includes this
// file inside of an unnamed namespace, after linear_bf16_read.inc.h.
//
// A tile of weights has 32 columns of 16 outputs, as they lie in memory. A tile of x has the same
// columns of up to 16 rows. It has to be arranged: two columns of a row come first, then the same
// two of the next row. One instruction multiplies two tiles and adds the products to 16 x 16 sums,
// so up to 32 rows cost little more than reading the weights. Weights of one byte become bfloat16
// in a buffer in the first cache.

constexpr size_t kTileOutputs = 16;
constexpr size_t kTileBytes = 64;  // the bytes of a row of a tile
// How many bytes ahead weights are prefetched. A processor looks some hundred instructions ahead.
// Converting a block takes more than that, so the processor would begin to load the next block too
// late. Of 256, 512 and 1024 bytes the first was the fastest for int8.
constexpr size_t kTileAhead = 256;

// The compilers' intrinsics do not say that they read and write memory.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// The shapes of all tiles, in the form that the instruction takes. Tiles 0 to 3 are sums, 4 and 5
// weights, 6 and 7 rows of x.
struct alignas(kLineBytes) TileShapes {
  TileShapes(size_t outputs, size_t rows) {
    const auto row_bytes = static_cast<uint16_t>(rows * sizeof(float));
    for (size_t i = 0; i < 8; ++i) {
      const bool of_weights = i == 4 || i == 5;
      bytes[i] = of_weights ? uint16_t{kTileBytes} : row_bytes;
      height[i] = i < 6 ? static_cast<uint8_t>(outputs) : uint8_t{kTileBytes / 4};
    }
  }
  void load() const {
    settle_memory();
    _tile_loadconfig(this);
  }

  uint8_t palette = 1;
  uint8_t reserved[15] = {};
  uint16_t bytes[16] = {};
  uint8_t height[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

// Sets the sums of G tiles of weights and N tiles of x to zero. Those of tiles g and n are in tile
// 2 g + n.
template <size_t G, size_t N>
inline void clear_sums() {
  _tile_zero(0);
  if constexpr (N == 2) _tile_zero(1);
  if constexpr (G == 2) _tile_zero(2);
  if constexpr (G == 2 && N == 2) _tile_zero(3);
}

// Rows of x, as prepare() arranged them: in tiles of `tile` rows that are `next` numbers apart.
struct TileRows {
  TileRows(const LinearPanel& panel, size_t row)
      : x(reinterpret_cast<const Bf16*>(panel.x + row * panel.x_step)),
        next(2 * panel.tile * panel.x_step),
        tile(panel.tile) {}

  const Bf16* x;
  size_t next;
  size_t tile;
};

// Adds the products of 32 columns. The weights of one output are `step` bytes before those of the
// next.
template <size_t G, size_t N>
inline void add_products(const std::byte* weights, size_t step, const TileRows& rows, size_t at) {
  const Bf16* numbers = rows.x + at * rows.tile;
  const size_t x_step = rows.tile * sizeof(float);
  _tile_loadd(4, weights, step);
  _tile_loadd(6, numbers, x_step);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (N == 2) {
    _tile_loadd(7, numbers + rows.next, x_step);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (G == 2) {
    _tile_loadd(5, weights + kTileOutputs * step, step);
    _tile_dpbf16ps(2, 5, 6);
  }
  if constexpr (G == 2 && N == 2) _tile_dpbf16ps(3, 5, 7);
}

// The sums of a tile. A row has those of one output; its first `panel.tile` numbers are used.
struct TileSums {
  alignas(kLineBytes) float of[kTileOutputs][kTileOutputs];
};

template <size_t G, size_t N>
inline void store_sums(TileSums (&to)[G][N]) {
  _tile_stored(0, to[0][0].of, kTileBytes);
  if constexpr (N == 2) _tile_stored(1, to[0][1].of, kTileBytes);
  if constexpr (G == 2) _tile_stored(2, to[1][0].of, kTileBytes);
  if constexpr (G == 2 && N == 2) _tile_stored(3, to[1][1].of, kTileBytes);
  settle_memory();
}

// Outputs of a panel that are multiplied together, and the first row of x.
struct TilePlace {
  size_t output = 0;
  size_t outputs = 0;  // how many each tile has
  size_t row = 0;
};

// Writes the sums to the panel, whose columns are outputs.
template <size_t G, size_t N>
void put_sums(const LinearPanel& panel, const TilePlace& place, const TileSums (&sums)[G][N]) {
  for (size_t g = 0; g < G; ++g) {
    for (size_t n = 0; n < N; ++n) {
      float* to = panel.sums + (place.row + n * panel.tile) * panel.outputs + place.output +
                  g * kTileOutputs;
      for (size_t m = 0; m < panel.tile; ++m) {
        for (size_t r = 0; r < place.outputs; ++r) to[m * panel.outputs + r] = sums[g][n].of[r][m];
      }
    }
  }
}

// Weights as bfloat16, of all outputs that are multiplied together.
template <size_t G, size_t kVectors>
struct TileBlock {
  alignas(kLineBytes) std::byte rows[G * kTileOutputs][kVectors * kTileBytes];
};

// Reads the first `bytes` of a block and sets the rest of it to zero. A whole block has 64 bytes.
template <class Reader, size_t G>
CXL_OFFLOAD_VECTOR void read_block(const Reader& reader, const LinearPanel& panel,
                                   const TilePlace& place, size_t offset, size_t bytes,
                                   TileBlock<G, Reader::kVectors>& to) {
  const std::byte* from = panel.weight + place.output * panel.weight_step + offset;
  const __mmask64 there = ~uint64_t{0} >> (kLineBytes - bytes);
  for (size_t r = 0; r < G * place.outputs; ++r) {
    __m512i numbers[Reader::kVectors];
    __builtin_prefetch(from + r * panel.weight_step + kTileAhead, 0, 3);
    reader.read(_mm512_maskz_loadu_epi8(there, from + r * panel.weight_step), numbers);
#pragma GCC unroll 4
    for (size_t n = 0; n < Reader::kVectors; ++n) {
      _mm512_store_si512(to.rows[r] + n * kTileBytes, numbers[n]);
    }
  }
}

template <size_t G, size_t N, size_t kVectors>
inline void add_block(const TileBlock<G, kVectors>& block, const TileRows& rows, size_t at) {
  settle_memory();
  for (size_t n = 0; n < kVectors; ++n) {
    add_products<G, N>(block.rows[0] + n * kTileBytes, kVectors * kTileBytes, rows,
                       at + n * kBf16Lanes);
  }
  settle_memory();
}

// Adds the products of all columns of a strip, block by block. Before it multiplies a block it
// reads the next one, so that a block has arrived in the first cache when tiles are loaded from it.
template <class Reader, size_t G, size_t N>
CXL_OFFLOAD_VECTOR void add_converted(const LinearPanel& panel, const TilePlace& place) {
  constexpr size_t kBlock = Reader::kVectors * kBf16Lanes;  // weights in a line
  const Reader reader;
  const TileRows rows(panel, place.row);
  TileBlock<G, Reader::kVectors> blocks[2];
  const auto read = [&](size_t at, size_t slot) {
    const size_t bytes = std::min(panel.width - at, kBlock) * kLineBytes / kBlock;
    read_block<Reader, G>(reader, panel, place, at * kLineBytes / kBlock, bytes, blocks[slot]);
  };
  read(0, 0);
  for (size_t at = 0; at < panel.width; at += kBlock) {
    const size_t slot = at / kBlock % 2;
    if (at + kBlock < panel.width) read(at + kBlock, 1 - slot);
    add_block<G, N>(blocks[slot], rows, at);
  }
}

template <class W, size_t G, size_t N>
[[gnu::noinline]] void multiply_strip(const LinearPanel& panel, const TilePlace& place) {
  clear_sums<G, N>();
  if constexpr (std::is_same_v<W, Bf16>) {
    const TileRows rows(panel, place.row);
    const std::byte* from = panel.weight + place.output * panel.weight_step;
    const size_t whole = panel.width / kBf16Lanes * kBf16Lanes;
    for (size_t at = 0; at < whole; at += kBf16Lanes) {
      add_products<G, N>(from + at * sizeof(Bf16), panel.weight_step, rows, at);
    }
    if (whole < panel.width) {  // nothing beyond a row of weights is read, and x is zero there
      TileBlock<G, 1> rest;
      read_block<Bf16Reader<W>, G>({}, panel, place, whole * sizeof(Bf16),
                                   (panel.width - whole) * sizeof(Bf16), rest);
      add_block<G, N>(rest, rows, whole);
    }
  } else {
    add_converted<Bf16Reader<W>, G, N>(panel, place);
  }
  TileSums sums[G][N];
  store_sums<G, N>(sums);
  put_sums<G, N>(panel, place, sums);
}

// Multiplies all rows by the weights of one strip, before the next strip is read.
template <size_t G, class Visit>
void visit_rows(const LinearPanel& panel, TilePlace place, const Visit& visit) {
  const size_t both = 2 * panel.tile;
  for (place.row = 0; place.row + both <= panel.rows; place.row += both) {
    visit.template operator()<G, 2>(place);
  }
  if (place.row < panel.rows) visit.template operator()<G, 1>(place);
}

// Calls visit<G, N>(place) for strips of G tiles of outputs, at most kMost, and N tiles of rows.
template <size_t kMost, class Visit>
void visit_strips(const LinearPanel& panel, const Visit& visit) {
  TileShapes(kTileOutputs, panel.tile).load();
  TilePlace place;
  place.outputs = kTileOutputs;
  if constexpr (kMost == 2) {
    for (; place.output + 2 * kTileOutputs <= panel.outputs; place.output += 2 * kTileOutputs) {
      visit_rows<2>(panel, place, visit);
    }
  }
  for (; place.output < panel.outputs; place.output += kTileOutputs) {
    place.outputs = std::min(panel.outputs - place.output, kTileOutputs);
    if (place.outputs < kTileOutputs) TileShapes(place.outputs, panel.tile).load();
    visit_rows<1>(panel, place, visit);
  }
  _tile_release();
}

template <class W>
void multiply(const LinearPanel& panel) {
  visit_strips<2>(panel, [&]<size_t G, size_t N>(const TilePlace& place) {
    multiply_strip<W, G, N>(panel, place);
  });
}

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

template <class W>
void prepare(const LinearInput& input) {
  if (input.tile == 1) {
    prepare_rows<W>(input);
    return;
  }
  const size_t step = round_up(input.width, kLinearPad);
  const auto rows = std::make_unique<Bf16[]>(input.tile * step);
  for (size_t row = 0; row < input.rows; row += input.tile) {
    const size_t count = std::min(input.tile, input.rows - row);
    for (size_t i = 0; i < count; ++i) {
      prepare_row<W>(input.x + static_cast<ptrdiff_t>(row + i) * input.x_step, input.width,
                     rows.get() + i * step);
    }
    std::fill(rows.get() + count * step, rows.get() + input.tile * step, Bf16{});
    pair_rows(rows.get(), step, input.tile, step / 2,
              reinterpret_cast<Bf16*>(input.to + row * input.to_step));
  }
}

// Returns how many rows a tile has. All tiles then have about as many.
inline size_t tile_of(size_t rows) {
  const size_t tiles = (rows + kTileOutputs - 1) / kTileOutputs;
  return (rows + tiles - 1) / tiles;
}

template <class W>
LinearKernel kernel_of(Dtype weight) {
  return {prepare<W>, multiply<W>, linear_kernel_avx512(weight).finish, tile_of};
}
