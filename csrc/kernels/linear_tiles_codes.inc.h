// Multiplies weights of 4-bit codes by tiles of bfloat16. linear_tiles_amx.cc includes this file
// inside of an unnamed namespace, after linear_tiles.inc.h.
//
// Tiles sum the products of one group. A few groups have tiles of their own, so that products of
// one need not wait for those of another. Their sums go to the first cache. There they are
// multiplied by the steps of their groups, and the products of the lows with the sums of x are
// added.

// A block of 32 or 64 codes, which are of one group.
template <size_t kColumns>
struct CodeBlock {};

// Four neighbouring codes take 16 bits, of which the lowest four are the second code. A block
// becomes numbers in four parts, one part for each of the four codes. For each part the 16 bits are
// rotated so that its code lies where number() takes it.
template <size_t kColumns>
struct Bf16Reader<CodeBlock<kColumns>> {
  static constexpr size_t kVectors = kColumns / kBf16Lanes;
  static constexpr size_t kBytes = kColumns / 2;
  static constexpr size_t kPart = kColumns / 4;  // in codes

  static void arrange(const Bf16* from, Bf16* to) {
    for (size_t i = 0; i < kColumns; ++i) to[i] = from[i % kPart * 4 + (i / kPart ^ 1)];
  }

  CXL_OFFLOAD_VECTOR Bf16Reader() {
    constexpr uint32_t kTurns[] = {3, 32 - 1, 32 - 5, 32 - 9};
    alignas(kLineBytes) uint32_t each[kVectors][16];
    for (size_t i = 0; i < kVectors * 16; ++i) each[i / 16][i % 16] = kTurns[i * 2 / kPart];
    for (size_t n = 0; n < kVectors; ++n) turns[n] = _mm512_load_si512(each[n]);
  }
  CXL_OFFLOAD_VECTOR void read(const std::byte* from, __m512i* to) const {
    __m512i codes;
    if constexpr (kVectors == 2) {
      codes = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    } else {
      codes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
#pragma GCC unroll 2
    for (size_t n = 0; n < kVectors; ++n) {
      to[n] = Bf16Reader<Codes>::number(_mm512_rolv_epi32(codes, turns[n]));
    }
  }

  __m512i turns[kVectors];
};

// How far ahead codes are prefetched. A processor looks some hundred instructions ahead. Converting
// a line takes more than that, so the processor would begin to load the next line too late.
constexpr size_t kCodesAhead = 128;  // in bytes

// Numbers of one group, for each output of a tile or each of its sums.
struct alignas(kLineBytes) GroupNumbers {
  float of[kTileOutputs];
};

// What a panel of codes needs beside its sums. X says how many parts the numbers of x have.
template <size_t X>
struct CodesRoom {
  explicit CodesRoom(const LinearPanel& panel)
      : groups(panel.width / panel.group),
        steps(std::make_unique_for_overwrite<GroupNumbers[]>(round_up(groups, size_t{16}))),
        lows(std::make_unique_for_overwrite<GroupNumbers[]>(round_up(groups, size_t{16}))),
        x_sums(std::make_unique_for_overwrite<GroupNumbers[]>(panel.rows / panel.tile * groups)) {
    for (size_t row = 0; row < panel.rows; row += panel.tile) sum_groups(panel, row);
  }

  // Sums the rows of x of a tile over groups. Pairs of columns of these rows lie side by side. The
  // sums are repeated until they fill a vector.
  CXL_OFFLOAD_VECTOR void sum_groups(const LinearPanel& panel, size_t row) {
    const TileRows rows(panel, row);
    const auto there = static_cast<__mmask16>((1U << panel.tile) - 1);
    const __m512i one = _mm512_set1_epi16(0x3f80);
    const __m512i repeated =
        _mm512_and_si512(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(static_cast<int32_t>(panel.tile - 1)));
    GroupNumbers* to = x_sums.get() + row / panel.tile * groups;
    for (size_t group = 0; group < groups; ++group) {
      __m512 sums[4] = {};  // a single one would wait for each product
      for (size_t part = 0; part < X; ++part) {
        const Bf16* numbers = rows.x + part * rows.part;
        for (size_t at = group * panel.group; at < (group + 1) * panel.group; at += 8) {
#pragma GCC unroll 4
          for (size_t i = 0; i < 4; ++i) {
            const __m512i pair =
                _mm512_maskz_loadu_epi32(there, numbers + (at + 2 * i) * rows.tile);
            sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)pair, (__m512bh)one);
          }
        }
      }
      const __m512 halves[] = {_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])};
      const __m512 sum = _mm512_add_ps(halves[0], halves[1]);
      _mm512_store_ps(to[group].of, _mm512_permutexvar_ps(repeated, sum));
    }
  }

  // Reads the scales of a tile of outputs, for codes that are read as 16 more than they are.
  CXL_OFFLOAD_VECTOR void read_scales(const LinearPanel& panel, const TilePlace& place) {
    const F16* from = panel.pairs + place.output * panel.pairs_step;
    for (size_t at = 0; at < groups; at += 16) {
      const auto there = static_cast<__mmask16>((1U << std::min(groups - at, size_t{16})) - 1);
      __m512i pairs[16];
      for (size_t r = 0; r < 16; ++r) {
        const __mmask16 some = r < place.outputs ? there : __mmask16{0};
        pairs[r] = _mm512_maskz_loadu_epi32(some, from + r * panel.pairs_step + 2 * at);
      }
      transpose(pairs);
      for (size_t i = 0; i < 16; ++i) {
        const __m512i second = _mm512_srli_epi32(pairs[i], 16);
        const __m512 a = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs[i]));
        const __m512 b = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(second));
        const __m512 step = panel.form == GroupScales::kInverseLow ? inverse_of(a) : b;
        __m512 low = panel.form == GroupScales::kInverseLow ? b : a;
        if (panel.form == GroupScales::kZeroStep) {
          low = _mm512_fnmadd_ps(a, b, _mm512_setzero_ps());
        }
        _mm512_store_ps(steps[at + i].of, step);
        _mm512_store_ps(lows[at + i].of, _mm512_fnmadd_ps(step, _mm512_set1_ps(kCodeOffset), low));
      }
    }
  }

  size_t groups;
  std::unique_ptr<GroupNumbers[]> steps;   // [groups], for the outputs of a tile
  std::unique_ptr<GroupNumbers[]> lows;    // [groups], for the outputs of a tile
  std::unique_ptr<GroupNumbers[]> x_sums;  // [tiles of x][groups]
};

// A strip of a tile of outputs and N tiles of rows.
template <class W, size_t N, size_t X>
struct CodesStrip {
  using Reader = Bf16Reader<W>;
  static constexpr size_t kVectors = Reader::kVectors;
  static constexpr size_t kColumns = kVectors * kBf16Lanes;
  static constexpr size_t kLineCodes = 2 * kLineBytes;  // two in a byte
  static constexpr size_t kLineBlocks = kLineCodes / kColumns;
  static constexpr size_t kGroups = 4 / N;  // groups that have tiles of their own
  // How many outputs of the next line are read before a product of two tiles.
  static constexpr size_t kSome = kTileOutputs / (kLineBlocks * kVectors * N * X);
  static_assert(kSome * kLineBlocks * kVectors * N * X == kTileOutputs);
  using Lines = TileBlock<1, kLineBlocks * kVectors>;
  // The sums of a tile of x in one group, without gaps: those of all its rows with the first output
  // come first. They fill as many vectors as the tile has rows.
  struct alignas(kLineBytes) Sums {
    float of[kTileOutputs * kTileOutputs];
  };

  CXL_OFFLOAD_VECTOR CodesStrip(const LinearPanel& panel, const CodesRoom<X>& room,
                                const TilePlace& place)
      : panel(panel), room(room), place(place), rows(panel, place.row) {
    std::memset(totals, 0, sizeof(totals));
    std::memset(waiting, 0, sizeof(waiting));  // numbers beyond the outputs are never stored
  }

  // The line that begins at a column is read next, or what is left of it.
  CXL_OFFLOAD_VECTOR void begin(size_t at, Lines& to) {
    from = panel.weight + place.output * panel.weight_step + at / 2;
    next = to.rows[0];
    const size_t blocks = at < panel.width ? std::min(panel.width - at, kLineCodes) / kColumns : 0;
    whole = blocks == kLineBlocks && place.outputs == kTileOutputs;
    if (!whole) read_some(blocks);
  }
  CXL_OFFLOAD_VECTOR void read_block(size_t i) {
    __m512i numbers[kVectors];
    reader.read(from + i * Reader::kBytes, numbers);
#pragma GCC unroll 2
    for (size_t n = 0; n < kVectors; ++n) {
      _mm512_store_si512(next + (i * kVectors + n) * kTileBytes, numbers[n]);
    }
  }
  // Reads lines that are shorter, or fewer, at once.
  void read_some(size_t blocks) {
    for (size_t r = 0; r < place.outputs; ++r) {
      for (size_t i = 0; i < blocks; ++i) read_block(i);
      from += panel.weight_step;
      next += sizeof(Lines::rows[0]);
    }
  }
  // Reads the next kCount lines.
  template <size_t kCount>
  CXL_OFFLOAD_VECTOR void read() {
    if (!whole) return;
#pragma GCC unroll 16
    for (size_t r = 0; r < kCount; ++r) {
      prefetch_near(from + kCodesAhead);
#pragma GCC unroll 4
      for (size_t i = 0; i < kLineBlocks; ++i) read_block(i);
      from += panel.weight_step;
      next += sizeof(Lines::rows[0]);
    }
  }

  // Adds the products of a group to the tiles of a slot, and reads lines that come later.
  template <size_t kSlot>
  CXL_OFFLOAD_VECTOR void add_group() {
    for (const size_t end = at + panel.group; at < end; at += kColumns) {
      const size_t now = at / kLineCodes % 2;
      if (at % kLineCodes == 0) begin(at + kLineCodes, lines[1 - now]);
      const std::byte* numbers = lines[now].rows[0] + at % kLineCodes * sizeof(Bf16);
      for (size_t n = 0; n < kVectors; ++n) {
        const Bf16* x = rows.x + (at + n * kBf16Lanes) * rows.tile;
        for (size_t part = 0; part < X; ++part, x += rows.part) {
          read<kSome>();
          settle_memory();
          _tile_loadd(4, numbers + n * kTileBytes, sizeof(lines[0].rows[0]));
          _tile_loadd(6, x, rows.tile * sizeof(float));
          add_product<kSlot>();
          if constexpr (N == 2) {
            read<kSome>();
            settle_memory();
            _tile_loadd(6, x + rows.next, rows.tile * sizeof(float));
            add_product<kSlot + 1>();
          }
        }
      }
    }
  }

  template <size_t kTile>
  CXL_OFFLOAD_VECTOR static void add_product() {
    if constexpr (kTile == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTile == 1) _tile_dpbf16ps(1, 4, 6);
    if constexpr (kTile == 2) _tile_dpbf16ps(2, 4, 6);
    if constexpr (kTile == 3) _tile_dpbf16ps(3, 4, 6);
  }

  void store() {
    const size_t step = panel.tile * sizeof(float);
    _tile_stored(0, waiting[0].of, step);
    _tile_stored(1, waiting[1].of, step);
    _tile_stored(2, waiting[2].of, step);
    _tile_stored(3, waiting[3].of, step);
    settle_memory();
  }

  // Takes `count` groups from group `first` on. Adds their sums times their steps, and their lows
  // times the sums of x, to the totals.
  CXL_OFFLOAD_VECTOR void scale(size_t first, size_t count) {
    const auto* steps = room.steps.get() + first;
    const auto* lows = room.lows.get() + first;
    for (size_t n = 0; n < N; ++n) {
      const auto* sums = room.x_sums.get() + (place.row / panel.tile + n) * room.groups + first;
      for (size_t v = 0; v < panel.tile; ++v) {
        float* to = totals[n].of + v * kTileOutputs;
        const auto add = [&](const auto& each) {
          Vector total = Vector::load(to);
          for (size_t i = 0; i < count; ++i) {
            const Vector sum = Vector::load(waiting[i * N + n].of + v * kTileOutputs);
            total = fma(each(lows[i]), Vector::load(sums[i].of), total);
            total = fma(each(steps[i]), sum, total);
          }
          total.store(to);
        };
        if (panel.tile == kTileOutputs) {  // a vector has the rows of one output
          add([&](const GroupNumbers& numbers) { return Vector::all(numbers.of[v]); });
        } else {
          const __m512i of = outputs_of(v);
          add([&](const GroupNumbers& numbers) {
            return Vector{_mm512_permutexvar_ps(of, _mm512_load_ps(numbers.of))};
          });
        }
      }
    }
  }

  // The output of each number of a vector of sums.
  CXL_OFFLOAD_VECTOR __m512i outputs_of(size_t v) const {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i begin = _mm512_set1_epi32(static_cast<int32_t>(v * kTileOutputs));
    const int shift = std::countr_zero(static_cast<uint32_t>(panel.tile));
    return _mm512_srl_epi32(_mm512_add_epi32(lane, begin), _mm_cvtsi32_si128(shift));
  }

  void put() const {
    for (size_t n = 0; n < N; ++n) {
      float* to = panel.sums + (place.row + n * panel.tile) * panel.outputs + place.output;
      for (size_t m = 0; m < panel.tile; ++m) {
        for (size_t r = 0; r < place.outputs; ++r) {
          to[m * panel.outputs + r] = totals[n].of[r * panel.tile + m];
        }
      }
    }
  }

  // Sums are scaled after the next products have begun, which would otherwise wait for them.
  CXL_OFFLOAD_VECTOR void run() {
    begin(0, lines[0]);
    read<kTileOutputs>();
    for (size_t group = 0; group < room.groups; group += kGroups) {
      const size_t count = std::min(room.groups - group, kGroups);
      clear_sums<2, 2>();
      add_group<0>();
      if (group > 0) scale(group - kGroups, kGroups);
      if (count > 1) add_group<N>();
      if constexpr (N == 1) {
        if (count > 2) add_group<2>();
        if (count > 3) add_group<3>();
      }
      store();
    }
    const size_t last = (room.groups - 1) / kGroups * kGroups;
    scale(last, room.groups - last);
    put();
  }

  const LinearPanel& panel;
  const CodesRoom<X>& room;
  const TilePlace& place;
  const TileRows rows;
  const Reader reader{};
  const std::byte* from = nullptr;
  std::byte* next = nullptr;
  bool whole = false;  // the line has 64 bytes of each of 16 outputs
  size_t at = 0;
  Lines lines[2];
  Sums totals[N];
  Sums waiting[4];
};

template <class W, size_t N, size_t X>
[[gnu::noinline]] void multiply_codes_strip(const LinearPanel& panel, const TilePlace& place,
                                            CodesRoom<X>& room) {
  if (place.row == 0) room.read_scales(panel, place);
  CodesStrip<W, N, X>(panel, room, place).run();
}

template <size_t kColumns, size_t X>
void multiply_codes(const LinearPanel& panel) {
  CodesRoom<X> room(panel);
  visit_strips<1>(panel, [&]<size_t G, size_t N>(const TilePlace& place) {
    multiply_codes_strip<CodeBlock<kColumns>, N, X>(panel, place, room);
  });
}

// Tiles have 1, 2, 4, 8 or 16 rows, so that their sums fill whole vectors.
inline size_t even_tile_of(size_t rows) { return std::bit_ceil(tile_of(rows)); }

template <size_t kColumns>
LinearKernel codes_kernel(Dtype x) {
  using W = CodeBlock<kColumns>;
  const auto finish = linear_kernel_avx512(Dtype::kUint8).finish;
  if (x == Dtype::kFloat16) {
    return {prepare<W, 2>,   multiply_codes<kColumns, 2>, finish, even_tile_of, kLinearOutputs,
            2 * sizeof(Bf16)};
  }
  return {prepare<W, 1>, multiply_codes<kColumns, 1>, finish, even_tile_of, kLinearOutputs,
          sizeof(Bf16)};
}
