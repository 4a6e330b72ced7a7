// Linear layers by tiles of bfloat16 (AMX). linear_tiles_amx.cc includes this file inside of an
// unnamed namespace, after linear_bf16_read.inc.h.
//
// A tile of weights has 32 columns of 16 outputs, as they lie in memory. A tile of x has the same
// columns of up to 16 rows. It has to be arranged: two columns of a row come first, then the same
// two of the next row. One instruction multiplies two tiles and adds the products to 16 x 16 sums,
// so up to 32 rows cost little more than reading the weights. Other weights become bfloat16 in a
// buffer in the first cache.
//
// Numbers of float16 are sums of two parts (F16Parts). The products of the parts of a weight and of
// a number of x are added to the same sum.

constexpr size_t kTileBytes = 64;  // the bytes of a row of a tile

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

// Rows of x, as prepare() arranged them: in tiles of `tile` rows that are `next` numbers apart. In
// a tile, each part of the numbers begins `part` numbers after the one before.
struct TileRows {
  TileRows(const LinearPanel& panel, size_t row)
      : x(reinterpret_cast<const Bf16*>(panel.x + row * panel.x_step)),
        next(2 * panel.tile * panel.x_step),
        part(panel.tile * round_up(panel.width, kLinearPad)),
        tile(panel.tile) {}

  const Bf16* x;
  size_t next;
  size_t part;
  size_t tile;
};

// Multiplies 32 columns of G tiles of weights, whose outputs are `step` bytes apart, by the X parts
// of N tiles of x, and adds the products. `between` is called before each product of two tiles.
template <size_t G, size_t N, size_t X, class Between>
CXL_OFFLOAD_VECTOR void add_products(const std::byte* weights, size_t step, const TileRows& rows,
                                     size_t at, const Between& between) {
  const Bf16* numbers = rows.x + at * rows.tile;
  const size_t x_step = rows.tile * sizeof(float);
#pragma GCC unroll 2
  for (size_t part = 0; part < X; ++part, numbers += rows.part) {
    between();
    if (part == 0) _tile_loadd(4, weights, step);
    _tile_loadd(6, numbers, x_step);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      between();
      _tile_loadd(7, numbers + rows.next, x_step);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (G == 2) {
      between();
      if (part == 0) _tile_loadd(5, weights + kTileOutputs * step, step);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (G == 2 && N == 2) {
      between();
      _tile_dpbf16ps(3, 5, 7);
    }
  }
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
CXL_OFFLOAD_VECTOR void put_sums(const LinearPanel& panel, const TilePlace& place,
                                 const TileSums (&sums)[G][N]) {
  const auto there = static_cast<__mmask16>((1U << place.outputs) - 1);
  for (size_t g = 0; g < G; ++g) {
    for (size_t n = 0; n < N; ++n) {
      float* to = panel.sums + (place.row + n * panel.tile) * panel.outputs + place.output +
                  g * kTileOutputs;
      __m512i columns[kTileOutputs];
#pragma GCC unroll 16
      for (size_t r = 0; r < kTileOutputs; ++r) columns[r] = _mm512_load_si512(sums[g][n].of[r]);
      transpose(columns);
#pragma GCC unroll 16
      for (size_t m = 0; m < kTileOutputs; ++m) {
        if (m < panel.tile) _mm512_mask_storeu_epi32(to + m * panel.outputs, there, columns[m]);
      }
    }
  }
}

// Weights as bfloat16, of all outputs that are multiplied together.
template <size_t G, size_t kVectors>
struct TileBlock {
  alignas(kLineBytes) std::byte rows[G * kTileOutputs][kVectors * kTileBytes];
};

// Makes blocks of the weights of a strip, some outputs at a time.
template <class W, size_t G>
class BlockReading {
 public:
  using Reader = Bf16Reader<W>;
  using Block = TileBlock<G, Reader::kVectors>;
  static constexpr size_t kOutputs = G * kTileOutputs;

  CXL_OFFLOAD_VECTOR BlockReading(const LinearPanel& panel, const TilePlace& place)
      : from_(panel.weight + place.output * panel.weight_step),
        step_(panel.weight_step),
        outputs_(G * place.outputs) {}

  // The next block has these bytes of each output. A whole block has 64.
  CXL_OFFLOAD_VECTOR void begin(size_t offset, size_t bytes) {
    next_ = from_ + offset;
    there_ = ~uint64_t{0} >> (kLineBytes - bytes);
    output_ = 0;
  }

  // Reads the next `count` outputs; numbers beyond the bytes are zero.
  template <bool kWhole = false>
  CXL_OFFLOAD_VECTOR void read(size_t count, Block& to) {
    for (size_t i = 0; i < count; ++i, ++output_, next_ += step_) {
      if (G == 1 && output_ >= outputs_) return;  // two tiles of outputs are always whole
      __m512i numbers[Reader::kVectors];
      reader_.read(kWhole ? _mm512_loadu_si512(next_) : _mm512_maskz_loadu_epi8(there_, next_),
                   numbers);
#pragma GCC unroll 4
      for (size_t n = 0; n < Reader::kVectors; ++n) {
        _mm512_store_si512(to.rows[output_] + n * kTileBytes, numbers[n]);
      }
    }
  }

 private:
  const Reader reader_{};
  const std::byte* from_;
  const size_t step_;
  const size_t outputs_;
  const std::byte* next_ = nullptr;
  __mmask64 there_ = 0;
  size_t output_ = 0;
};

// Adds the products of a block, whose first column is `at`.
template <class W, size_t G, size_t N, size_t X, class Between>
CXL_OFFLOAD_VECTOR void add_block(const typename BlockReading<W, G>::Block& block,
                                  const TileRows& rows, size_t at, const Between& between) {
  constexpr size_t kVectors = Bf16Reader<W>::kVectors;
  const auto settled = [&] {
    between();
    settle_memory();
  };
#pragma GCC unroll 2
  for (size_t n = 0; n < kVectors; ++n) {
    add_products<G, N, X>(block.rows[0] + n * kTileBytes, kVectors * kTileBytes, rows,
                          at + n / kWeightParts<W> * kBf16Lanes, settled);
  }
}

// Adds the products of all columns of a strip, block by block. Some outputs of the next block are
// read before each product of tiles, so that the processor reads and multiplies at the same time.
template <class W, size_t G, size_t N, size_t X>
CXL_OFFLOAD_VECTOR void add_converted(const LinearPanel& panel, const TilePlace& place) {
  using Reading = BlockReading<W, G>;
  constexpr size_t kBlock = kBlockWeights<W>;
  constexpr size_t kProducts = Bf16Reader<W>::kVectors * G * N * X;
  static_assert(Reading::kOutputs % kProducts == 0);
  const TileRows rows(panel, place.row);
  Reading reading(panel, place);
  const auto begin = [&](size_t at) {
    reading.begin(at * kLineBytes / kBlock,
                  std::min(panel.width - at, kBlock) * kLineBytes / kBlock);
  };
  typename Reading::Block blocks[2];
  begin(0);
  reading.read(Reading::kOutputs, blocks[0]);
  size_t at = 0;
  size_t slot = 0;
  for (; at + 2 * kBlock <= panel.width; at += kBlock, slot = 1 - slot) {
    begin(at + kBlock);
    add_block<W, G, N, X>(blocks[slot], rows, at, [&] {
      reading.template read<true>(Reading::kOutputs / kProducts, blocks[1 - slot]);
    });
  }
  if (at + kBlock < panel.width) {
    begin(at + kBlock);
    reading.read(Reading::kOutputs, blocks[1 - slot]);
    add_block<W, G, N, X>(blocks[slot], rows, at, [] {});
    at += kBlock;
    slot = 1 - slot;
  }
  add_block<W, G, N, X>(blocks[slot], rows, at, [] {});
}

// Prefetches the tiles that are multiplied two steps of columns later, some lines before each
// product. Products of two tiles of x take so long that the processor does not reach the loads of
// the next columns in time, and its prefetchers follow fewer rows than two tiles of weights have.
template <size_t G, size_t N, size_t X>
class TilesAhead {
 public:
  CXL_OFFLOAD_VECTOR TilesAhead(const LinearPanel& panel, const TilePlace& place,
                                const TileRows& rows)
      : from_(panel.weight + place.output * panel.weight_step),
        step_(panel.weight_step),
        width_(panel.width * sizeof(Bf16)),
        rows_(rows) {}

  // The columns that are multiplied next begin at `at`. After the last columns of these outputs
  // come the first ones of the next outputs.
  CXL_OFFLOAD_VECTOR void begin(size_t at) {
    const size_t offset = (at + kColumns) * sizeof(Bf16);
    weights_ = offset < width_ ? from_ + offset : from_ + kOutputs * step_ + (offset - width_);
    x_ = reinterpret_cast<const std::byte*>(rows_.x + (at + kColumns) * rows_.tile);
    product_ = 0;
  }

  CXL_OFFLOAD_VECTOR void operator()() {
#pragma GCC unroll 16
    for (size_t i = 0; i < kOutputs / kProducts; ++i, weights_ += step_) prefetch_near(weights_);
    const size_t tile = product_ / G;
    const std::byte* x = x_ + (tile / N * rows_.part + tile % N * rows_.next) * sizeof(Bf16) +
                         product_ % G * kLines * kLineBytes;
#pragma GCC unroll 16
    for (size_t i = 0; i < kLines; ++i) prefetch_near(x + i * kLineBytes);
    ++product_;
  }

 private:
  static constexpr size_t kColumns = 2 * kBf16Lanes;
  static constexpr size_t kOutputs = G * kTileOutputs;
  static constexpr size_t kProducts = G * N * X;
  static constexpr size_t kLines = kTileOutputs / G;  // of a tile of x

  const std::byte* from_;
  const size_t step_;
  const size_t width_;
  const TileRows& rows_;
  const std::byte* weights_ = nullptr;
  const std::byte* x_ = nullptr;
  size_t product_ = 0;
};

// Adds the products of all columns of a strip of bfloat16, which tiles read where it lies.
template <size_t G, size_t N, size_t X>
CXL_OFFLOAD_VECTOR void add_in_place(const LinearPanel& panel, const TilePlace& place) {
  const TileRows rows(panel, place.row);
  const std::byte* from = panel.weight + place.output * panel.weight_step;
  const size_t whole = panel.width / kBf16Lanes * kBf16Lanes;
  [[maybe_unused]] TilesAhead<G, N, X> ahead(panel, place, rows);
  for (size_t at = 0; at < whole; at += kBf16Lanes) {
    if constexpr (N == 2) ahead.begin(at);
    add_products<G, N, X>(from + at * sizeof(Bf16), panel.weight_step, rows, at, [&] {
      if constexpr (N == 2) ahead();
    });
  }
  if (whole == panel.width) return;
  // Nothing beyond a row of weights is read, and x is zero there.
  BlockReading<Bf16, G> reading(panel, place);
  typename BlockReading<Bf16, G>::Block rest;
  reading.begin(whole * sizeof(Bf16), (panel.width - whole) * sizeof(Bf16));
  reading.read(reading.kOutputs, rest);
  add_block<Bf16, G, N, X>(rest, rows, whole, [] {});
}

template <class W, size_t G, size_t N, size_t X>
[[gnu::noinline]] void multiply_strip(const LinearPanel& panel, const TilePlace& place) {
  clear_sums<G, N>();
  if constexpr (std::is_same_v<W, Bf16>) {
    add_in_place<G, N, X>(panel, place);
  } else {
    add_converted<W, G, N, X>(panel, place);
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

template <class W, size_t X>
void multiply(const LinearPanel& panel) {
  visit_strips<2>(panel, [&]<size_t G, size_t N>(const TilePlace& place) {
    multiply_strip<W, G, N, X>(panel, place);
  });
}

// Returns how many rows a tile has. All tiles then have about as many.
inline size_t tile_of(size_t rows) {
  const size_t tiles = (rows + kTileOutputs - 1) / kTileOutputs;
  return (rows + tiles - 1) / tiles;
}

template <class W>
LinearKernel kernel_of(Dtype x, Dtype weight) {
  const auto finish = linear_kernel_avx512(weight).finish;
  if (x == Dtype::kFloat16)
    return {prepare<W, 2>, multiply<W, 2>, finish, tile_of, 2 * kTileOutputs, 2 * sizeof(Bf16)};
  return {prepare<W, 1>, multiply<W, 1>, finish, tile_of, 2 * kTileOutputs, sizeof(Bf16)};
}
