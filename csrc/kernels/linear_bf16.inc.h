// Linear layers by products of bfloat16, for x of bfloat16. linear_bf16_avx512.cc and
// linear_vbmi_avx512.cc include this file inside of an unnamed namespace, after
// linear_bf16_read.inc.h, linear_order.inc.h and linear_codes_room.inc.h.
//
// Weights of bfloat16, E4M3, int8 and 4-bit codes convert to bfloat16 exactly, so products are
// exact. A number of float16 would need two of bfloat16, which gains nothing.
//
// The sources have defined Products, which says how a vector of 32 numbers is multiplied:
//   Number   what numbers of x are kept as,
//   kParts   how many vectors of x they are,
//   keep()   writes them,
//   part()   returns the weights that a part of them is multiplied by, and
//   add()    adds the products to the sums of 16 lanes.
// Each lane gets the product of the odd number of a pair first and then that of the even one, as
// the instruction for both has it. So all sources come to the same bits, but for subnormal numbers.

// Writes the first kBf16Lanes numbers of each row of a tile, then the next ones of each. A loop
// over a tile then reads from one address and constants beyond it. With an address for each row
// there were more than the registers hold, and 8 rows took twice as long.
template <class W>
void prepare_rows(const LinearInput& input) {
  const size_t vectors = round_up(input.width, kBlockWeights<W>) / kBf16Lanes;
  const auto arranged = std::make_unique_for_overwrite<Bf16[]>(vectors * kBf16Lanes);
  for (size_t row = 0; row < input.rows; ++row) {
    const std::byte* from = input.x + static_cast<ptrdiff_t>(row) * input.x_step;
    const size_t in_tile = row % input.tile;
    auto* tile = reinterpret_cast<Products::Number*>(input.to + (row - in_tile) * input.to_step);
    prepare_row<W>(from, input.width, arranged.get());
    for (size_t n = 0; n < vectors; ++n) {
      Products::keep(_mm512_loadu_si512(arranged.get() + n * kBf16Lanes),
                     tile + (n * input.tile + in_tile) * kBf16Lanes);
    }
  }
}

constexpr size_t kPartLanes = kBf16Lanes / Products::kParts;

// The sums of a strip of R outputs and a tile of M rows.
template <class W, size_t M, size_t R>
struct Strip {
  using Reader = Bf16Reader<W>;
  static constexpr size_t kVectors = Reader::kVectors;
  static constexpr size_t kBlock = kVectors * kBf16Lanes;
  static constexpr bool kSpread = is_spread<M, R>(kBlock, sizeof(Products::Number));
  static constexpr bool kCodes = std::is_same_v<W, Codes>;

  CXL_OFFLOAD_VECTOR Strip(const LinearPanel& panel, const Room& room, const Step& step)
      : panel(panel),
        room(room),
        step(step),
        x(reinterpret_cast<const Products::Number*>(panel.x + step.row * panel.x_step)),
        weight(panel.weight + step.output * panel.weight_step),
        apart(step.apart * panel.weight_step) {
    if constexpr (kCodes) {
      steps_apart = step.apart * groups_of(panel);
      steps = room.steps.data.get() + step.output * groups_of(panel);
      first_groups = room.first_groups.data.get();
      places = _mm512_load_si512(room.scale_places);
    }
#pragma GCC unroll 32
    for (size_t i = 0; i < M * R; ++i) {
      sum[i / R][i % R] = step.first ? Vector::all(0) : step.sums[i];
    }
  }

  CXL_OFFLOAD_VECTOR void wait(Vector* to) const {
#pragma GCC unroll 32
    for (size_t i = 0; i < M * R; ++i) to[i] = sum[i / R][i % R];
  }

  // Adds the products of a block of weights.
  CXL_OFFLOAD_VECTOR void add(const __m512i (&numbers)[R][kVectors], size_t at,
                              Vector (&to)[M][R]) {
#pragma GCC unroll 4
    for (size_t n = 0; n < kVectors; ++n) {
      add_part<0>(numbers, n, at, to);
      if constexpr (Products::kParts == 2) add_part<1>(numbers, n, at, to);
    }
  }
  template <size_t kPart>
  CXL_OFFLOAD_VECTOR void add_part(const __m512i (&numbers)[R][kVectors], size_t n, size_t at,
                                   Vector (&to)[M][R]) {
    const auto* from = x + (at + n * kBf16Lanes) * M + kPart * kPartLanes;
    __m512i weights[R];
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) weights[r] = Products::part<kPart>(numbers[r][n]);
#pragma GCC unroll 8
    for (size_t m = 0; m < M; ++m) {
      __m512i number = _mm512_loadu_si512(from + m * kBf16Lanes);
      asm("" : "+v"(number));  // as in_register()
#pragma GCC unroll 8
      for (size_t r = 0; r < R; ++r) Products::add(to[m][r].value, weights[r], number);
    }
  }
  // For codes: multiplies the sums of a block by the steps of their groups.
  CXL_OFFLOAD_VECTOR void add_scaled(const __m512i (&numbers)[R][kVectors], size_t at) {
    Vector block[M][R];
#pragma GCC unroll 32
    for (size_t i = 0; i < M * R; ++i) block[i / R][i % R] = Vector::all(0);
    add(numbers, at, block);
    const float* from = steps + first_groups[at / kBlock];
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
      const __m512 some = _mm512_castps128_ps512(_mm_loadu_ps(from + r * steps_apart));
      const Vector scale{_mm512_permutexvar_ps(places, some)};
#pragma GCC unroll 8
      for (size_t m = 0; m < M; ++m) sum[m][r] = fma(block[m][r], scale, sum[m][r]);
    }
  }

  template <Prefetch kInto>
  CXL_OFFLOAD_VECTOR void columns(size_t begin, size_t end) {
    const Reader reader;
    size_t at = begin;
    __m512i numbers[R][kVectors];
    for (; at + kBlock <= end; at += kBlock) {
      const auto here = static_cast<ptrdiff_t>(at / kBlock * kLineBytes);
      const std::byte* from = weight + here;
      const ptrdiff_t far = kSpread && here >= step.turn ? step.jump : step.ahead;
#pragma GCC unroll 8
      for (size_t r = 0; r < R; ++r) {
        reader.read(_mm512_loadu_si512(from + r * apart), numbers[r]);
        prefetch_into<kInto>(from + r * apart + far);
      }
      if constexpr (kCodes) {
        add_scaled(numbers, at);
      } else {
        add(numbers, at, sum);
      }
    }
    if constexpr (!kCodes) {  // a row of codes has whole blocks only
      if (at == end) return;
      // These are fewer weights than a block has. Nothing beyond them is read, and x is zero there.
      const __mmask64 left = (uint64_t{1} << (end - at) * sizeof(W)) - 1;
      for (size_t r = 0; r < R; ++r) {
        const std::byte* from = weight + r * apart + at / kBlock * kLineBytes;
        reader.read(_mm512_maskz_loadu_epi8(left, from), numbers[r]);
      }
      add(numbers, at, sum);
    }
  }

  CXL_OFFLOAD_VECTOR void store() {
    if constexpr (kCodes) {
      const size_t count = groups_of(panel);
      add_lows(panel, room, step, room.sums.data.get() + step.row * count, count, sum);
    }
    write_totals(panel, step, sum);
  }

  const LinearPanel& panel;
  const Room& room;
  const Step& step;
  const Products::Number* x;  // as prepare_rows() wrote the tile
  const std::byte* weight;    // those of the first output
  size_t apart;               // bytes from one output to the next
  // For codes: what `room` has for the first output.
  const float* steps = nullptr;
  size_t steps_apart = 0;  // from one output to the next
  const uint32_t* first_groups = nullptr;
  __m512i places{};
  Vector sum[M][R];
};

// Sums x over the groups of codes.
inline void sum_groups(const LinearPanel& panel, Room& room) {
  const size_t count = groups_of(panel);
  float* all_sums = room.sums.of(panel.rows * count);
  std::fill_n(all_sums, panel.rows * count, 0.0f);
  const __m512i one = _mm512_set1_epi16(0x3f80);
  for (size_t row = 0; row < panel.rows; ++row) {
    const size_t in_tile = row % panel.tile;
    const auto* x =
        reinterpret_cast<const Products::Number*>(panel.x + (row - in_tile) * panel.x_step);
    float* sums = all_sums + row * count;
    for (size_t at = 0; at < panel.width; at += 128) {
      __m512 lanes = _mm512_setzero_ps();
      for (size_t n = 0; n < 4; ++n) {
        const auto* from = x + ((at / kBf16Lanes + n) * panel.tile + in_tile) * kBf16Lanes;
        Products::add(lanes, Products::part<0>(one), _mm512_loadu_si512(from));
        if constexpr (Products::kParts == 2) {
          Products::add(lanes, Products::part<1>(one), _mm512_loadu_si512(from + kPartLanes));
        }
      }
      float each[16];  // of eight codes
      _mm512_storeu_ps(each, lanes);
      float* of_block = sums + room.first_groups.data[at / 128];
      for (size_t i = 0; i < 16; ++i) of_block[room.scale_places[i]] += each[i];
    }
  }
}

template <class W, size_t M, size_t R, Prefetch kInto>
[[gnu::noinline]] void multiply_strip(const LinearPanel& panel, const Room& room,
                                      const Step& step) {
  Strip<W, M, R> strip(panel, room, step);
  strip.template columns<kInto>(step.begin, step.end);
  if (step.last) {
    strip.store();
  } else {
    strip.wait(step.sums);
  }
}

template <class W, size_t M, size_t R>
void multiply_tiles(const LinearPanel& panel) {
  constexpr size_t kBlock = Bf16Reader<W>::kVectors * kBf16Lanes;
  Room& room = room_of_this_thread();
  if constexpr (std::is_same_v<W, Codes>) {
    read_scales(panel, room);
    sum_groups(panel, room);
  }
  Order order(panel, kBlock, sizeof(Products::Number), 0, panel.width);
  order.cut<M, R>();
  visit_steps<M, R>(order, [&]<size_t kStrip>(const Step& step) {
    if constexpr (Strip<W, M, kStrip>::kSpread) {
      if (panel.prefetch == Prefetch::kNearest) {
        return multiply_strip<W, M, kStrip, Prefetch::kNearest>(panel, room, step);
      }
      if (panel.prefetch == Prefetch::kNone) {
        return multiply_strip<W, M, kStrip, Prefetch::kNone>(panel, room, step);
      }
    }
    multiply_strip<W, M, kStrip, Prefetch::kSecond>(panel, room, step);
  });
}

// How many outputs a strip has beside tiles of 1, 2, 4, 6 and 8 rows. The registers allow no more
// beside many rows; beside one row, weights are read into the nearest cache faster in fewer
// streams, also by the processor alone.
template <class W>
constexpr size_t strip_outputs(size_t index) {
  constexpr size_t kOfBf16[] = {2, 4, 4, 4, 3};
  constexpr bool kWide = Products::kParts == 2;
  constexpr size_t kOfBytes[] = {kWide ? 4 : 2, 4, kWide ? 3 : 4, 2, 2};
  constexpr size_t kOfCodes[] = {4, 3, 2, 1, 1};
  if (std::is_same_v<W, Codes>) return kOfCodes[index];
  return sizeof(W) == 1 ? kOfBytes[index] : kOfBf16[index];
}

template <class W>
void multiply(const LinearPanel& panel) {
  switch (panel.tile) {
    case 1:
      if (panel.prefetch == Prefetch::kSecond) return multiply_tiles<W, 1, 4>(panel);
      return multiply_tiles<W, 1, strip_outputs<W>(0)>(panel);
    case 2:
      return multiply_tiles<W, 2, strip_outputs<W>(1)>(panel);
    case 4:
      return multiply_tiles<W, 4, strip_outputs<W>(2)>(panel);
    case 6:
      return multiply_tiles<W, 6, strip_outputs<W>(3)>(panel);
    default:
      return multiply_tiles<W, 8, strip_outputs<W>(4)>(panel);
  }
}

[[gnu::noinline]] double products_per_s() {
  return rate_of<kPartLanes>([](Vector& sum, Vector one) {
    const __m512i numbers = _mm512_castps_si512(one.value);
    Products::add(sum.value, numbers, numbers);
  });
}

template <class W>
LinearKernel kernel_of(Dtype weight) {
  LinearKernel kernel = linear_kernel_avx512(weight);
  kernel.products_per_s = products_per_s;
  kernel.prepare = prepare_rows<W>;
  kernel.multiply = multiply<W>;
  return kernel;
}
