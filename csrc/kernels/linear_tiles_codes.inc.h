// Multiplies weights of 4-bit codes by tiles of bfloat16. linear_tiles_amx.cc includes this file
// inside of an unnamed namespace, after linear_tiles.inc.h.
//
// Tiles sum the products of one group. The sums of a few groups are kept in the first cache. Then
// they are multiplied by the steps of their groups, and the products of the lows with the sums of x
// are added.

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

// How many groups have their sums kept before these are multiplied by steps.
constexpr size_t kGroupsWaiting = 4;
// How far ahead codes are prefetched. A processor looks some hundred instructions ahead. Converting
// a line takes more than that, so the processor would begin to load the next line too late.
constexpr size_t kCodesAhead = 128;  // in bytes

// Numbers of one group: one for each output of a tile, or one for each of its rows of x.
struct alignas(kLineBytes) GroupNumbers {
  float of[kTileOutputs];
};

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

// What a panel of codes needs beside its sums.
struct CodesRoom {
  explicit CodesRoom(const LinearPanel& panel)
      : groups(panel.width / panel.group),
        steps(std::make_unique_for_overwrite<GroupNumbers[]>(round_up(groups, size_t{16}))),
        lows(std::make_unique_for_overwrite<GroupNumbers[]>(round_up(groups, size_t{16}))),
        x_sums(std::make_unique_for_overwrite<GroupNumbers[]>(panel.rows / panel.tile * groups)) {
    for (size_t row = 0; row < panel.rows; row += panel.tile) sum_groups(panel, row);
  }

  // Sums the rows of x of a tile over groups. Pairs of columns of these rows lie side by side.
  CXL_OFFLOAD_VECTOR void sum_groups(const LinearPanel& panel, size_t row) {
    const TileRows rows(panel, row);
    const auto there = static_cast<__mmask16>((1U << panel.tile) - 1);
    const __m512i one = _mm512_set1_epi16(0x3f80);
    GroupNumbers* to = x_sums.get() + row / panel.tile * groups;
    for (size_t group = 0; group < groups; ++group) {
      __m512 sums[4] = {};  // a single one would wait for each product
      for (size_t at = group * panel.group; at < (group + 1) * panel.group; at += 8) {
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) {
          const Bf16* from = rows.x + (at + 2 * i) * rows.tile;
          const __m512i pair = _mm512_maskz_loadu_epi32(there, from);
          sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)pair, (__m512bh)one);
        }
      }
      const __m512 halves[] = {_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])};
      _mm512_store_ps(to[group].of, _mm512_add_ps(halves[0], halves[1]));
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
template <class W, size_t N>
struct CodesStrip {
  using Reader = Bf16Reader<W>;
  static constexpr size_t kVectors = Reader::kVectors;
  static constexpr size_t kColumns = kVectors * kBf16Lanes;
  static constexpr size_t kLineCodes = 2 * kLineBytes;  // two in a byte
  static constexpr size_t kLineBlocks = kLineCodes / kColumns;
  using Lines = TileBlock<1, kLineBlocks * kVectors>;

  CodesStrip(const LinearPanel& panel, const CodesRoom& room, const TilePlace& place)
      : panel(panel), room(room), place(place) {
    std::memset(totals, 0, sizeof(totals));
    std::memset(waiting, 0, sizeof(waiting));  // numbers beyond the rows are never stored
  }

  // Reads a line of each output, or what is left of it.
  CXL_OFFLOAD_VECTOR void read(const Reader& reader, size_t at, Lines& to) const {
    if (at + kLineCodes <= panel.width) {
      read_blocks(reader, at, kLineBlocks, to);
    } else if (at < panel.width) {
      read_blocks(reader, at, (panel.width - at) / kColumns, to);
    }
  }
  CXL_OFFLOAD_VECTOR void read_blocks(const Reader& reader, size_t at, size_t blocks,
                                      Lines& to) const {
    const std::byte* from = panel.weight + place.output * panel.weight_step + at / 2;
    for (size_t r = 0; r < place.outputs; ++r) {
      __builtin_prefetch(from + kCodesAhead, 0, 3);
#pragma GCC unroll 4
      for (size_t i = 0; i < blocks; ++i) {
        __m512i numbers[kVectors];
        reader.read(from + i * Reader::kBytes, numbers);
#pragma GCC unroll 2
        for (size_t n = 0; n < kVectors; ++n) {
          _mm512_store_si512(to.rows[r] + (i * kVectors + n) * kTileBytes, numbers[n]);
        }
      }
      from += panel.weight_step;
    }
  }

  CXL_OFFLOAD_VECTOR void add(const Lines& lines, const TileRows& rows, size_t at) const {
    const std::byte* numbers = lines.rows[0] + at % kLineCodes * sizeof(Bf16);
    settle_memory();
    for (size_t n = 0; n < kVectors; ++n) {
      add_products<1, N>(numbers + n * kTileBytes, sizeof(lines.rows[0]), rows,
                         at + n * kBf16Lanes);
    }
    settle_memory();
  }

  // A single row has its outputs side by side, which is where store() puts them.
  bool single() const { return panel.tile == 1; }

  void store(size_t slot) {
    if (N == 1 && single()) {
      _tile_stored(0, waiting[slot][0][0].of, sizeof(float));
      settle_memory();
    } else {
      store_sums<1, N>(waiting[slot]);
    }
  }

  // Takes `count` groups from group `first` on. Adds their sums times their steps, and their lows
  // times the sums of x, to the totals.
  CXL_OFFLOAD_VECTOR void scale(size_t first, size_t count) {
    const auto* sums = room.x_sums.get() + place.row / panel.tile * room.groups + first;
    const auto* steps = room.steps.get() + first;
    const auto* lows = room.lows.get() + first;
    if (N == 1 && single()) {
      Vector total = Vector::load(totals[0][0].of[0]);
      for (size_t i = 0; i < count; ++i) {
        total = fma(Vector::load(lows[i].of), Vector::all(sums[i].of[0]), total);
        total = fma(Vector::load(steps[i].of), Vector::load(waiting[i][0][0].of[0]), total);
      }
      total.store(totals[0][0].of[0]);
      return;
    }
#pragma GCC unroll 2
    for (size_t n = 0; n < N; ++n) {
      for (size_t r = 0; r < place.outputs; ++r) {
        Vector total = Vector::load(totals[0][n].of[r]);
        for (size_t i = 0; i < count; ++i) {
          const Vector sum = Vector::load(sums[n * room.groups + i].of);
          total = fma(Vector::all(lows[i].of[r]), sum, total);
          total = fma(Vector::all(steps[i].of[r]), Vector::load(waiting[i][0][n].of[r]), total);
        }
        total.store(totals[0][n].of[r]);
      }
    }
  }

  void put() const {
    if (N == 1 && single()) {
      float* to = panel.sums + place.row * panel.outputs + place.output;
      std::copy_n(totals[0][0].of[0], place.outputs, to);
    } else {
      put_sums<1, N>(panel, place, totals);
    }
  }

  // Reads the next line before it multiplies one, so that a line has arrived in the first cache
  // when tiles are loaded from it.
  CXL_OFFLOAD_VECTOR void run() {
    const Reader reader;
    const TileRows rows(panel, place.row);
    Lines lines[2];
    read(reader, 0, lines[0]);
    size_t at = 0;
    for (size_t group = 0; group < room.groups; ++group) {
      clear_sums<1, N>();
      for (const size_t end = at + panel.group; at < end; at += kColumns) {
        const size_t slot = at / kLineCodes % 2;
        if (at % kLineCodes == 0) read(reader, at + kLineCodes, lines[1 - slot]);
        add(lines[slot], rows, at);
      }
      store(group % kGroupsWaiting);
      const size_t count = group % kGroupsWaiting + 1;
      if (count == kGroupsWaiting || group + 1 == room.groups) scale(group + 1 - count, count);
    }
    put();
  }

  const LinearPanel& panel;
  const CodesRoom& room;
  const TilePlace& place;
  TileSums totals[1][N];
  TileSums waiting[kGroupsWaiting][1][N];
};

template <class W, size_t N>
[[gnu::noinline]] void multiply_codes_strip(const LinearPanel& panel, const TilePlace& place,
                                            CodesRoom& room) {
  if (place.row == 0) room.read_scales(panel, place);
  CodesStrip<W, N>(panel, room, place).run();
}

template <size_t kColumns>
void multiply_codes(const LinearPanel& panel) {
  CodesRoom room(panel);
  visit_strips<1>(panel, [&]<size_t G, size_t N>(const TilePlace& place) {
    multiply_codes_strip<CodeBlock<kColumns>, N>(panel, place, room);
  });
}

template <size_t kColumns>
LinearKernel codes_kernel() {
  const auto finish = linear_kernel_avx512(Dtype::kUint8).finish;
  return {prepare<CodeBlock<kColumns>>, multiply_codes<kColumns>, finish, tile_of};
}
