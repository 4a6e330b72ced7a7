// Included inside of an anonymous namespace by each instruction set's source, after
// attention_loop.inc.h: attention over rows of 4-bit codes, which become numbers in registers.

constexpr size_t kWordCodes = 4;
constexpr size_t kUnitCodes = kWordCodes * Vector::kLanes;  // of a load

inline void copy_scales(const std::byte* from, size_t bytes, std::byte* to) {
  if (bytes == 8) {  // heads of 128 in groups of 64: a copy of known length is an instruction
    std::memcpy(to, from, 8);
  } else if (bytes == 4) {
    std::memcpy(to, from, 4);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// The scales of `count` rows as float: [row][head][group]{step, low}.
inline void read_scales(const std::byte* const* from, size_t head_step, size_t count,
                        const AttentionState& state) {
  const size_t each = state.groups * 2 * sizeof(F16);  // bytes of a head
  auto* to = reinterpret_cast<std::byte*>(state.halves);
  for (size_t i = 0; i < count; ++i) {
    if (head_step == each) {
      copy_scales(from[i], state.kv_heads * each, to);
      to += state.kv_heads * each;
      continue;
    }
    for (size_t head = 0; head < state.kv_heads; ++head, to += each) {
      copy_scales(from[i] + head * head_step, each, to);
    }
  }
  const size_t all = count * state.kv_heads * state.groups * 2;
  for (size_t at = 0; at < all; at += Vector::kLanes) {
    load_scales(state.halves, at, state.inverse).store(state.scales + at);
  }
}

// Four vectors of numbers of a row. The first is of the first code of each word, and so on: queries
// and sums have the same order.
struct UnitNumbers {
  Vector of[kWordCodes];

  template <class Words>
  static inline __attribute__((always_inline)) UnitNumbers read(const Words& words,
                                                                const Table& table) {
    return {{table.number<4>(words), table.number<0>(words), table.number<12>(words),
             table.number<8>(words)}};
  }
};

struct CodeRows {
  const std::byte* const* rows;
  size_t head_offset;   // bytes
  const float* scales;  // of the first row, of this head
  size_t scales_step;   // floats from one row to the next

  inline __attribute__((always_inline)) UnitNumbers numbers(size_t row, size_t group,
                                                            size_t at) const {
    const float* pair = scales + row * scales_step + 2 * group;
    const Table table(pair[0], pair[1]);
    return UnitNumbers::read(load_words(rows[row] + head_offset + at / 2), table);
  }
};

// Scores of N rows for Q queries.
template <size_t N, size_t Q>
inline void score_codes(const CodeRows& rows, const AttentionState& state, size_t query,
                        float* scores) {
  const float* q = state.q + query * state.padded;
  Vector sum[Q][N];
#pragma GCC unroll 4
  for (size_t j = 0; j < Q; ++j) {
#pragma GCC unroll 4
    for (size_t i = 0; i < N; ++i) sum[j][i] = Vector::all(0);
  }
  for (size_t group = 0; group < state.groups; ++group) {
    const size_t end = (group + 1) * state.group_codes;
    for (size_t at = group * state.group_codes; at < end; at += kUnitCodes) {
#pragma GCC unroll 4
      for (size_t i = 0; i < N; ++i) {
        const UnitNumbers numbers = rows.numbers(i, group, at);
#pragma GCC unroll 4
        for (size_t j = 0; j < Q; ++j) {
#pragma GCC unroll 4
          for (size_t c = 0; c < kWordCodes; ++c) {
            const Vector part = Vector::load(q + j * state.padded + at + c * Vector::kLanes);
            sum[j][i] = fma(numbers.of[c], part, sum[j][i]);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (size_t j = 0; j < Q; ++j) {
    float* to = scores + (query + j) * kAttentionBlock;
    if constexpr (N == 4) {
      Vector::totals(sum[j], to);
    } else {
      to[0] = sum[j][0].total();
    }
  }
}

// Adds N rows, times their weights, to the sums of Q queries.
template <size_t N, size_t Q>
inline void add_codes(const CodeRows& rows, const AttentionState& state, size_t query,
                      const float* scores) {
  const float* weights = scores + query * kAttentionBlock;
  for (size_t group = 0; group < state.groups; ++group) {
    const size_t end = (group + 1) * state.group_codes;
    for (size_t at = group * state.group_codes; at < end; at += kUnitCodes) {
      float* sums = state.sums + query * state.padded + at;
      Vector sum[Q][kWordCodes];
#pragma GCC unroll 16
      for (size_t c = 0; c < Q * kWordCodes; ++c) {
        sum[c / kWordCodes][c % kWordCodes] =
            Vector::load(sums + c / kWordCodes * state.padded + c % kWordCodes * Vector::kLanes);
      }
#pragma GCC unroll 4
      for (size_t i = 0; i < N; ++i) {
        const UnitNumbers numbers = rows.numbers(i, group, at);
#pragma GCC unroll 4
        for (size_t j = 0; j < Q; ++j) {
          const Vector weight = Vector::all(weights[j * kAttentionBlock + i]);
#pragma GCC unroll 4
          for (size_t c = 0; c < kWordCodes; ++c) {
            sum[j][c] = fma(numbers.of[c], weight, sum[j][c]);
          }
        }
      }
#pragma GCC unroll 16
      for (size_t c = 0; c < Q * kWordCodes; ++c) {
        sum[c / kWordCodes][c % kWordCodes].store(sums + c / kWordCodes * state.padded +
                                                  c % kWordCodes * Vector::kLanes);
      }
    }
  }
}

struct CodesOf {
  const std::byte* const* rows;
  const std::byte* const* groups;
  size_t step;
  size_t groups_step;
};

// One of the two functions above.
template <size_t N, size_t Q, bool kScore>
inline void pass_codes(const CodeRows& rows, const AttentionState& state, size_t query,
                       float* scores) {
  if constexpr (kScore) {
    score_codes<N, Q>(rows, state, query, scores);
  } else {
    add_codes<N, Q>(rows, state, query, scores);
  }
}

// N rows from `first`, whose scales begin at those of row `scaled`.
template <size_t N, bool kScore>
inline void visit_rows(const CodesOf& of, const AttentionState& state, size_t ahead, size_t first,
                       size_t scaled) {
  constexpr size_t kQueries = 4;
  const size_t each = state.groups * 2;
  const size_t scales_step = state.kv_heads * each;
  for (size_t head = 0; head < state.kv_heads; ++head) {
    for (size_t i = first + ahead; i < first + ahead + N; ++i) {
      prefetch_row(of.rows[i] + head * of.step, state.padded / 2);
      prefetch_row(of.groups[i] + head * of.groups_step, each * sizeof(F16));
    }
    const CodeRows rows{of.rows + first, head * of.step,
                        state.scales + (first - scaled) * scales_step + head * each, scales_step};
    size_t query = head * state.group;
    const size_t end = query + state.group;
    float* scores = state.scores + first;
    for (; query + kQueries <= end; query += kQueries) {
      pass_codes<N, kQueries, kScore>(rows, state, query, scores);
    }
    for (; query < end; ++query) pass_codes<N, 1, kScore>(rows, state, query, scores);
  }
}

template <bool kScore>
inline void visit(const CodesOf& of, const AttentionRows& rows, const AttentionState& state) {
  constexpr size_t kRows = 4;
  for (size_t from = 0; from < rows.count; from += kAttentionScaleRows) {
    const size_t to = std::min(rows.count, from + kAttentionScaleRows);
    read_scales(of.groups + from, of.groups_step, to - from, state);
    size_t at = from;
    for (; at + kRows <= to; at += kRows)
      visit_rows<kRows, kScore>(of, state, rows.ahead, at, from);
    for (; at < to; ++at) visit_rows<1, kScore>(of, state, rows.ahead, at, from);
  }
}

void attend_codes(const AttentionRows& rows, const AttentionState& state) {
  visit<true>({rows.k, rows.k_groups, rows.k_step, rows.k_groups_step}, rows, state);
  weigh(rows, state);
  visit<false>({rows.v, rows.v_groups, rows.v_step, rows.v_groups_step}, rows, state);
}

AttentionPass find_pass(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBfloat16:
      return attend<Bf16>;
    case Dtype::kFloat16:
      return attend<F16>;
    case Dtype::kFloat8E4m3:
      return attend<E4m3>;
    case Dtype::kFloat8E5m2:
      return attend<E5m2>;
    case Dtype::kUint8:
      return attend_codes;
    case Dtype::kFloat32:
      break;
  }
  return attend<float>;
}
