// Layers of 4-bit codes where a vector has four or eight lanes. The sources of such instruction
// sets include this file after linear_loop.inc.h.
//
// A lane has a word of eight codes. Code c of every word is cut out where it is and becomes a
// number, which is 16^c times the code; x has been divided by that. So a vector of weights takes
// two instructions and a product. The step of a group is multiplied into the sums of its products,
// and its low value into the sum of its numbers of x:
//
//     sum of x * (code * step + low) = step * (sum of x * code) + low * (sum of x)

constexpr size_t kWordCodes = 8;
constexpr size_t kLeastGroup = 32;  // codes
constexpr size_t kBlockCodes = Vector::kLanes * kWordCodes;
static_assert(kLinearPad % kBlockCodes == 0);

// Returns where the code is that begins at bit 4 * `at` of a word. Of each byte the upper four bits
// come first.
constexpr size_t place_in_word(size_t at) { return at ^ 1; }

// Writes the numbers of a row block by block: first those that are multiplied by the lowest codes
// of all words. Behind them it writes 0 and the sum of x for each group, as panel.tables has its
// step and low value.
inline void arrange_codes(float* row, size_t padded, size_t group, size_t groups) {
  float* sums = row + padded;
  for (size_t at = 0; at < groups; ++at) {
    Vector sum = Vector::all(0);
    for (size_t i = 0; i < group; i += Vector::kLanes) {
      sum = add(sum, Vector::load(row + at * group + i));
    }
    sums[2 * at + 1] = sum.total();
  }
  for (size_t begin = 0; begin < padded; begin += kBlockCodes) {
    float block[kBlockCodes];
    std::memcpy(block, row + begin, sizeof(block));
    for (size_t at = 0; at < kWordCodes; ++at) {
      // The highest code is shifted down, because its highest bit would be the sign.
      const float factor = at + 1 < kWordCodes ? 1.0f / static_cast<float>(1u << 4 * at) : 1;
      for (size_t lane = 0; lane < Vector::kLanes; ++lane) {
        row[begin + at * Vector::kLanes + lane] =
            block[lane * kWordCodes + place_in_word(at)] * factor;
      }
    }
  }
}

void prepare_codes(const LinearInput& input) {
  prepare<false>(input);
  if (input.width == 0) return;
  const size_t padded = round_up(input.width, kLinearPad);
  for (size_t row = 0; row < input.rows; ++row) {
    arrange_codes(input.to + row * input.to_step, padded, input.group, input.width / input.group);
  }
}

// The sums of a strip of R outputs and a tile of M rows.
template <size_t M, size_t R>
struct CodeStrip {
  CXL_OFFLOAD_VECTOR CodeStrip(const LinearPanel& panel, const Step& step)
      : panel(panel),
        step(step),
        groups(panel.width / panel.group),
        x(panel.x + step.row * panel.x_step),
        codes(panel.weight + step.output * panel.weight_step),
        apart(step.apart * panel.weight_step) {
#pragma GCC unroll 32
    for (size_t i = 0; i < M * R; ++i) sum[i / R][i % R] = Vector::all(0);
  }

  // Adds the low values of all groups times the sums of x.
  void add_lows() {
    const size_t whole = 2 * groups / Vector::kLanes * Vector::kLanes;
    for (size_t r = 0; r < R; ++r) {
      const float* table = panel.tables + r * 2 * groups;
      const float* sums = x + round_up(panel.width, kLinearPad);
      for (size_t at = 0; at < whole; at += Vector::kLanes) {
        for (size_t m = 0; m < M; ++m) {
          sum[m][r] = mul_add(Vector::load(table + at), Vector::load(sums + m * panel.x_step + at),
                              sum[m][r]);
        }
      }
      if (whole == 2 * groups) continue;
      const Vector rest = Vector::load_some(table + whole, 2 * groups - whole);
      for (size_t m = 0; m < M; ++m) {
        sum[m][r] = mul_add(rest, Vector::load(sums + m * panel.x_step + whole), sum[m][r]);
      }
    }
  }

  template <size_t kAt>
  CXL_OFFLOAD_VECTOR static Vector code(const std::byte* from) {
    if constexpr (kAt + 1 == kWordCodes) return top_code(load_eights(from));
    return shifted_code<4 * kAt % 28>(load_eights(from));
  }

  // Adds the products of code kAt of the words of a block, or begins with them.
  template <size_t kAt, bool kBegins>
  CXL_OFFLOAD_VECTOR void add_codes(const std::byte* from, size_t between, size_t at,
                                    Vector (&to)[M][R]) const {
    Vector number[M];
#pragma GCC unroll 8
    for (size_t m = 0; m < M; ++m) {
      number[m] = in_register(Vector::load(x + m * panel.x_step + at + kAt * Vector::kLanes));
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
      const Vector weight = code<kAt>(from + r * between);
#pragma GCC unroll 8
      for (size_t m = 0; m < M; ++m) {
        to[m][r] = kBegins ? mul(weight, number[m]) : mul_add(weight, number[m], to[m][r]);
      }
    }
  }

  // Adds the products of a block of columns, or begins with them.
  template <bool kBegins>
  CXL_OFFLOAD_VECTOR void add_block(const std::byte* from, size_t between, size_t at,
                                    Vector (&to)[M][R]) const {
    add_codes<0, kBegins>(from, between, at, to);
    add_codes<1, false>(from, between, at, to);
    add_codes<2, false>(from, between, at, to);
    add_codes<3, false>(from, between, at, to);
    add_codes<4, false>(from, between, at, to);
    add_codes<5, false>(from, between, at, to);
    add_codes<6, false>(from, between, at, to);
    add_codes<7, false>(from, between, at, to);
  }

  CXL_OFFLOAD_VECTOR void prefetch(size_t here) const {
    constexpr bool kSpread = is_spread<M, R>(kLineWeights<Codes>, sizeof(float));
    if (here % kLineBytes != 0) return;
    const auto from = static_cast<ptrdiff_t>(here);
    const ptrdiff_t far = from + (kSpread && from >= step.turn ? step.jump : step.ahead);
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
      if (kSpread && panel.prefetch == Prefetch::kNearest) {
        prefetch_near(codes + r * apart + far);
      } else {
        prefetch_second(codes + r * apart + far);
      }
    }
  }

  // Adds the products of the columns [begin, end), which are whole blocks of one group.
  CXL_OFFLOAD_VECTOR void add_group(size_t begin, size_t end, size_t group) {
    Vector products[M][R];
    prefetch(bytes_of<Codes>(begin));
    add_block<true>(codes + bytes_of<Codes>(begin), apart, begin, products);
    for (size_t at = begin + kBlockCodes; at < end; at += kBlockCodes) {
      prefetch(bytes_of<Codes>(at));
      add_block<false>(codes + bytes_of<Codes>(at), apart, at, products);
    }
    add_products(products, group);
  }

  CXL_OFFLOAD_VECTOR void add_products(const Vector (&products)[M][R], size_t group) {
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
      const Vector step_of_group = Vector::all(panel.tables[r * 2 * groups + 2 * group]);
#pragma GCC unroll 8
      for (size_t m = 0; m < M; ++m) {
        sum[m][r] = mul_add(products[m][r], step_of_group, sum[m][r]);
      }
    }
  }

  // Adds the products of a block whose halves are of two groups, or whose second half is beyond the
  // row, where x is zero. It reads no codes beyond the row.
  CXL_OFFLOAD_VECTOR void add_halves(size_t at, size_t first, size_t second) {
    Vector products[M][R];
    prefetch(bytes_of<Codes>(at));
    if (at + kBlockCodes <= panel.width) {
      add_block<true>(codes + bytes_of<Codes>(at), apart, at, products);
    } else {
      constexpr size_t kBytes = bytes_of<Codes>(kBlockCodes);
      std::byte copy[R][kBytes] = {};
      for (size_t r = 0; r < R; ++r) {
        std::memcpy(copy[r], codes + r * apart + bytes_of<Codes>(at), kBytes / 2);
      }
      add_block<true>(copy[0], kBytes, at, products);
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
      const float* table = panel.tables + r * 2 * groups;
      const Vector steps = Vector::halves(table[2 * first], table[2 * second]);
#pragma GCC unroll 8
      for (size_t m = 0; m < M; ++m) sum[m][r] = mul_add(products[m][r], steps, sum[m][r]);
    }
  }

  const LinearPanel& panel;
  const Step& step;
  const size_t groups;
  const float* x;
  const std::byte* codes;  // those of the first output
  size_t apart;            // bytes from one output to the next
  Vector sum[M][R];
};

template <size_t M, size_t R>
[[gnu::noinline]] void multiply_codes(const LinearPanel& panel, const Step& step) {
  CodeStrip<M, R> strip(panel, step);
  if (step.begin == 0) strip.add_lows();
  size_t group = step.begin / panel.group;
  size_t stop = (group + 1) * panel.group;
  if (kBlockCodes == kLeastGroup || panel.group % kBlockCodes == 0) {
    for (size_t at = step.begin; at < step.end; at = stop, stop += panel.group, ++group) {
      strip.add_group(at, std::min(step.end, stop), group);
    }
  } else {
    for (size_t at = step.begin; at < step.end; at += kBlockCodes) {
      for (; stop <= at; stop += panel.group) ++group;
      const bool last = group + 1 == strip.groups;
      const size_t second = at + kBlockCodes / 2 < stop || last ? group : group + 1;
      strip.add_halves(at, group, second);
    }
  }
  store_sums(panel, step, strip.sum, step.begin > 0);
}
