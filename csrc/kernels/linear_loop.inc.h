// The loops of linear layers, written once over a type `Vector`. The source of each instruction set
// includes this file inside of an unnamed namespace, after linear_order.inc.h,
// linear_rows.inc.h and linear_weights.inc.h.
//
// A strip (linear_order.inc.h) is a few outputs whose weights are read side by side; a tile is a
// few rows of x. The sums of a strip and a tile stay in registers while the weights pass through.

// Writes the sums of a strip, or adds them to those of columns before.
template <size_t M, size_t R>
CXL_OFFLOAD_VECTOR void store_sums(const LinearPanel& panel, const Step& step,
                                   const Vector (&sum)[M][R], bool adds) {
  float totals[(M * R + 3) / 4 * 4];
  Vector all[(M * R + 3) / 4 * 4];
#pragma GCC unroll 32
  for (size_t i = 0; i < (M * R + 3) / 4 * 4; ++i) {
    all[i] = i < M * R ? sum[i / R][i % R] : Vector::all(0);
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < M * R; i += 4) Vector::totals(all + i, totals + i);
  float* to = panel.sums + step.row * panel.outputs + step.output;
  for (size_t m = 0; m < M; ++m) {
    for (size_t r = 0; r < R; ++r) {
      float& sum = to[m * panel.outputs + r * step.apart];
      sum = adds ? sum + totals[m * R + r] : totals[m * R + r];
    }
  }
}

// The sums of a strip of R outputs and a tile of M rows.
template <class W, size_t M, size_t R, bool kScaled>
struct Strip {
  using Source = Weights<W, R, kScaled>;
  static constexpr bool kSpread = is_spread<M, R>(kLineWeights<W>, sizeof(float));

  CXL_OFFLOAD_VECTOR Strip(const LinearPanel& panel, const Step& step)
      : panel(panel),
        step(step),
        x(panel.x + step.row * panel.x_step),
        weight(panel.weight + step.output * panel.weight_step),
        apart(step.apart * panel.weight_step) {
#pragma GCC unroll 32
    for (size_t i = 0; i < M * R; ++i) {
      sum[i / R][i % R] = step.first ? Vector::all(0) : step.sums[i];
    }
  }

  CXL_OFFLOAD_VECTOR const std::byte* row(size_t r) const { return weight + r * apart; }

  CXL_OFFLOAD_VECTOR void add(const Vector* weights, size_t at) {
#pragma GCC unroll 8
    for (size_t m = 0; m < M; ++m) {
      const Vector number = in_register(Vector::load(x + m * panel.x_step + at));
#pragma GCC unroll 8
      for (size_t r = 0; r < R; ++r) sum[m][r] = mul_add(weights[r], number, sum[m][r]);
    }
  }

  template <size_t kHalf>
  CXL_OFFLOAD_VECTOR void half(const Source& source, size_t at) {
    Vector weights[R];
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) weights[r] = source.template half<kHalf>(r, row(r), at);
    add(weights, at + kHalf * Vector::kLanes);
  }

  CXL_OFFLOAD_VECTOR void pair(const Source& source, size_t at) {
    if constexpr (kLoadsTwo<Vector, W>) {
      Vector first[R], second[R];
#pragma GCC unroll 8
      for (size_t r = 0; r < R; ++r) source.two(r, row(r), at, first[r], second[r]);
      add(first, at);
      add(second, at + Vector::kLanes);
    } else {
      half<0>(source, at);
      half<1>(source, at);
    }
  }

  // Prefetches for `bytes` of each output that begin at byte `here` of a row.
  template <Prefetch kInto>
  CXL_OFFLOAD_VECTOR void prefetch(size_t here, size_t bytes) const {
    const auto from = static_cast<ptrdiff_t>(here);
    const ptrdiff_t far = from + (kSpread && from >= step.turn ? step.jump : step.ahead);
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
      for (size_t byte = 0; byte < bytes; byte += kLineBytes) {
        prefetch_into<kInto>(row(r) + far + byte);
      }
    }
  }

  // Adds the products of the columns [begin, end), which are of one group.
  template <Prefetch kInto>
  CXL_OFFLOAD_VECTOR void columns(size_t begin, size_t end, size_t group) {
    const Source source(panel, step, group);
    constexpr size_t kLine = std::max(kLineWeights<W>, kPair);
    size_t at = begin;
    for (; at + kLine <= end; at += kLine) {
      prefetch<kInto>(bytes_of<W>(at), bytes_of<W>(kLine));
#pragma GCC unroll 16
      for (size_t in = 0; in < kLine; in += kPair) pair(source, at + in);
    }
    // A group of codes may be shorter than a line.
    if (std::is_same_v<W, Codes> && at < end && bytes_of<W>(at) % kLineBytes == 0) {
      prefetch<kInto>(bytes_of<W>(at), kLineBytes);
    }
    for (; at + kPair <= end; at += kPair) pair(source, at);
    if constexpr (!std::is_same_v<W, Codes>) {  // groups of codes have whole pairs only
      if (at == end) return;
      // rest() takes the address of a copy, so that the sums of this strip can stay in registers.
      Strip copy = *this;
      copy.rest(source, at, end);
#pragma GCC unroll 32
      for (size_t i = 0; i < M * R; ++i) sum[i / R][i % R] = copy.sum[i / R][i % R];
    }
  }

  // Adds the products of the last columns, which are fewer than a pair of vectors has. It reads no
  // weights beyond them.
  [[gnu::noinline]] void rest(const Source& source, size_t at, size_t end) {
    if constexpr (kPaired<W>) {
      W some[R][kPair] = {};
      for (size_t r = 0; r < R; ++r)
        std::memcpy(some[r], row(r) + bytes_of<W>(at), bytes_of<W>(end - at));
      Vector weights[2][R];
      for (size_t r = 0; r < R; ++r) Vector::load_pair(some[r], weights[0][r], weights[1][r]);
      add(weights[0], at);  // x is zero beyond the columns
      add(weights[1], at + Vector::kLanes);
    } else {
      for (; at < end; at += Vector::kLanes) {
        const size_t count = std::min(end - at, Vector::kLanes);
        Vector weights[R];
        for (size_t r = 0; r < R; ++r) weights[r] = source.some(r, row(r), at, count);
        // Beyond the columns another group may begin, where x is not zero.
        for (size_t m = 0; m < M; ++m) {
          const Vector number = Vector::load_some(x + m * panel.x_step + at, count);
          for (size_t r = 0; r < R; ++r) sum[m][r] = mul_add(weights[r], number, sum[m][r]);
        }
      }
    }
  }

  CXL_OFFLOAD_VECTOR void wait(Vector* to) const {
#pragma GCC unroll 32
    for (size_t i = 0; i < M * R; ++i) to[i] = sum[i / R][i % R];
  }

  const LinearPanel& panel;
  const Step& step;
  const float* x;
  const std::byte* weight;  // those of the first output
  size_t apart;             // bytes from one output to the next
  Vector sum[M][R];
};

// How many rows of x are multiplied together, and with how many outputs. Their sums, the weights
// and a vector of x must fit the registers.
struct Tile {
  size_t rows;
  size_t outputs;        // at most
  size_t coded_outputs;  // for 4-bit codes
};
constexpr size_t kTiles = Vector::kLanes == 1 ? 1 : Vector::kRegisters < 32 ? 3 : 5;
constexpr Tile tile_at(size_t index) {
  constexpr Tile kOne[] = {{1, 1, 1}};
  constexpr Tile kFew[] = {{1, 4, 4}, {2, 4, 4}, {4, 2, 2}};
  constexpr Tile kMany[] = {{1, 8, 6}, {2, 4, 4}, {4, 6, 4}, {6, 4, 3}, {8, 3, 2}};
  if constexpr (kTiles == 1) return kOne[index];
  return kTiles == 3 ? kFew[index] : kMany[index];
}

// E4M3 without its NaN is cheaper to convert, so rows without NaN are read that way where the
// instruction set has one. To know, a strip is read twice.
template <class W>
constexpr bool kLooksForNan = false;
template <>
constexpr bool kLooksForNan<E4m3> = !std::is_same_v<Vector::NoNan<E4m3>, E4m3>;

// Returns how many outputs a strip has.
template <class W>
constexpr size_t strip_outputs(const Tile& tile, bool into_second) {
  if (std::is_same_v<W, Codes>) return tile.coded_outputs;
  // Such a strip is read twice, and more outputs share what it costs to begin and to end it.
  if (kLooksForNan<W> && tile.rows <= 2) return 4 * tile.rows;
  if (tile.rows == 4 && is_spread<4, 4>(kLineWeights<W>, sizeof(float))) {
    return std::min(tile.outputs, size_t{4});
  }
  if (tile.rows > 1) return tile.outputs;
  if (into_second) return std::min(tile.outputs, size_t{4});
  // With one row few outputs suffice to read less of x than of weights, and fewer streams are read
  // into the nearest cache faster, also by the processor alone. But the vectors of a line are added
  // to one sum, each after the one before. With half as many outputs as such vectors, a line takes
  // no longer than two additions.
  const size_t vectors = kLineWeights<W> / Vector::kLanes;
  return std::min(tile.outputs, std::max(vectors / 2, size_t{2}));
}

// How rows of x are arranged for 4-bit codes, and a strip of them multiplied. Each source includes
// one of the files that define this: linear_codes_table.inc.h or linear_codes_eights.inc.h.
void prepare_codes(const LinearInput& input);
template <size_t M, size_t R>
void multiply_codes(const LinearPanel& panel, const Step& step);

// Reads the scales of codes as (step, low).
inline void read_tables(const LinearPanel& panel, const Step& step, size_t outputs) {
  const size_t count = 2 * (panel.width / panel.group);
  for (size_t r = 0; r < outputs; ++r) {
    const size_t output = step.output + r * step.apart;
    const F16* from = panel.pairs + output * panel.pairs_step;
    for (size_t at = 0; at < count; at += Vector::kLanes) {
      load_pairs(from + at, count - at, panel.form).store(panel.tables + r * count + at);
    }
  }
}

template <class W, size_t M, size_t R, bool kScaled, Prefetch kInto>
[[gnu::noinline]] void multiply_strip_as(const LinearPanel& panel, const Step& step) {
  Strip<W, M, R, kScaled> strip(panel, step);
  if constexpr (kScaled) {
    // Counts the groups: a division for each would take as long as the products of 64 codes.
    size_t group = step.begin / panel.group;
    size_t stop = (group + 1) * panel.group;
    for (size_t at = step.begin; at < step.end; at = stop, stop += panel.group, ++group) {
      strip.template columns<kInto>(at, std::min(step.end, stop), group);
    }
  } else {
    strip.template columns<kInto>(step.begin, step.end, 0);
  }
  if (step.last) {
    store_sums(panel, step, strip.sum, step.end > kLinearColumns);
  } else {
    strip.wait(step.sums);
  }
}

template <class W, size_t M, size_t R, bool kScaled>
CXL_OFFLOAD_VECTOR void multiply_strip(const LinearPanel& panel, const Step& step) {
  if constexpr (Strip<W, M, R, kScaled>::kSpread) {
    if (panel.prefetch == Prefetch::kNearest) {
      return multiply_strip_as<W, M, R, kScaled, Prefetch::kNearest>(panel, step);
    }
    if (panel.prefetch == Prefetch::kNone) {
      return multiply_strip_as<W, M, R, kScaled, Prefetch::kNone>(panel, step);
    }
  }
  multiply_strip_as<W, M, R, kScaled, Prefetch::kSecond>(panel, step);
}

template <class W, size_t M, size_t R, bool kScaled>
CXL_OFFLOAD_VECTOR void choose_strip(const LinearPanel& panel, const Step& step) {
  if constexpr (kLooksForNan<W>) {
    using NoNan = Vector::NoNan<W>;
    const W* rows[R];
    for (size_t r = 0; r < R; ++r) {
      const size_t output = step.output + r * step.apart;
      const std::byte* row = panel.weight + output * panel.weight_step;
      rows[r] = reinterpret_cast<const W*>(row) + step.begin;
    }
    if (!NoNan::any_nan(rows, R, step.end - step.begin)) {
      multiply_strip<NoNan, M, R, kScaled>(panel, step);
      return;
    }
  }
  multiply_strip<W, M, R, kScaled>(panel, step);
}

template <class W, size_t M, size_t R, bool kScaled>
void multiply_tiles(const LinearPanel& panel) {
  static_assert(kLinearOutputs / 2 % R == 0 && R <= kMostTogether);
  for (size_t begin = 0; begin < panel.width; begin += kLinearColumns) {
    const size_t end = std::min(panel.width, begin + kLinearColumns);
    Order order(panel, kLineWeights<W>, sizeof(float), begin, end);
    order.whole_strips = kLooksForNan<W>;
    // With scales of groups the columns are not cut: a group may be no whole number of pairs, and
    // would then be summed in another order.
    if constexpr (!kScaled) order.cut<M, R>();
    visit_steps<M, R>(order, [&]<size_t kStrip>(const Step& step) {
      if constexpr (std::is_same_v<W, Codes>) {
        read_tables(panel, step, kStrip);
        multiply_codes<M, kStrip>(panel, step);
      } else {
        choose_strip<W, M, kStrip, kScaled>(panel, step);
      }
    });
  }
}

template <class W, bool kScaled, size_t kIndex = 0>
void multiply_as(const LinearPanel& panel) {
  constexpr Tile kTile = tile_at(kIndex);
  if constexpr (kIndex + 1 < kTiles) {
    if (panel.tile != kTile.rows) return multiply_as<W, kScaled, kIndex + 1>(panel);
  }
  if (kTile.rows == 1 && panel.prefetch == Prefetch::kSecond) {
    return multiply_tiles<W, kTile.rows, strip_outputs<W>(kTile, true), kScaled>(panel);
  }
  multiply_tiles<W, kTile.rows, strip_outputs<W>(kTile, false), kScaled>(panel);
}

template <class W>
void multiply(const LinearPanel& panel) {
  if constexpr (std::is_same_v<W, Codes>) {
    multiply_as<W, true>(panel);
  } else if constexpr (sizeof(W) == 1) {
    if (panel.scale == nullptr) return multiply_as<W, false>(panel);
    multiply_as<W, true>(panel);
  } else {
    multiply_as<W, false>(panel);
  }
}

// Returns how many rows a tile has. All tiles then have about as many.
size_t tile_of(size_t rows) {
  const size_t most = tile_at(kTiles - 1).rows;
  const size_t tiles = (rows + most - 1) / most;
  size_t index = 0;
  while (tile_at(index).rows * tiles < rows) ++index;
  return tile_at(index).rows;
}

[[gnu::noinline]] double products_per_s() {
  return rate_of<Vector::kLanes>([](Vector& sum, Vector one) { sum = mul_add(one, one, sum); });
}

LinearKernel loops_of(Dtype weight) {
  switch (weight) {
    case Dtype::kBfloat16:
      return {prepare<true>, multiply<Bf16>, finish, tile_of};
    case Dtype::kFloat16:
      return {prepare<false>, multiply<F16>, finish, tile_of};
    case Dtype::kFloat8E4m3:
      return {prepare<false>, multiply<E4m3>, finish, tile_of};
    case Dtype::kInt8:
      return {prepare<false>, multiply<int8_t>, finish, tile_of};
    case Dtype::kUint8:
      return {prepare_codes, multiply<Codes>, finish, tile_of};
    case Dtype::kFloat8E5m2:  // never weights
    case Dtype::kFloat32:
      break;
  }
  return {prepare<false>, multiply<float>, finish, tile_of};
}

LinearKernel find_kernel(Dtype weight) {
  LinearKernel kernel = loops_of(weight);
  if constexpr (Vector::kLanes > 1) kernel.products_per_s = products_per_s;
  return kernel;
}
