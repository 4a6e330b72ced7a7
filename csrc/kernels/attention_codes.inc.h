// The loop of attention over rows of 4-bit codes, which become numbers in registers. The source of
// each instruction set includes it inside of an anonymous namespace, after attention_loop.inc.h.

constexpr size_t kWordCodes = 4;
constexpr size_t kUnitCodes = kWordCodes * Vector::kLanes;  // what one load reads

// How a row of codes is cut into groups. FlexGen has one group of 64 for heads of 64 and two for
// heads of 128. kGroups fixes that number when compiling, because loops over so few groups would
// cost more than their bodies. With kGroups = 0 a row has any number of groups.
template <size_t kGroups>
struct Cut {
  static size_t groups(const AttentionState& state) {
    return kGroups == 0 ? state.groups : kGroups;
  }
  static size_t group_codes(const AttentionState& state) {
    return kGroups == 0 ? state.group_codes : kGroupCodes;
  }
  static size_t codes(const AttentionState& state) {
    return kGroups == 0 ? state.padded : kGroups * kGroupCodes;
  }
};

// Where the rows of K, or those of V, and their scales are.
struct CodesOf {
  const std::byte* const* rows;
  const std::byte* const* groups;
  size_t step;
  size_t groups_step;
  bool in_line;  // the scales of a row directly follow those of the row before
};

// Reads `count` numbers of scales as float pairs (step, low).
inline void read_pairs(const F16* from, size_t count, bool inverse, float* to) {
  const GroupScales form = inverse ? GroupScales::kInverseLow : GroupScales::kLowStep;
  for (size_t at = 0; at < count; at += Vector::kLanes) {
    load_pairs(from + at, count - at, form).store(to + at);
  }
}

// Reads the scales of `count` rows as float: [row][head][group]{step, low}.
template <class Cut>
inline void read_scales(const CodesOf& of, size_t first, size_t count,
                        const AttentionState& state) {
  const size_t head = Cut::groups(state) * 2;
  const size_t row = state.kv_heads * head;
  const std::byte* const* rows = of.groups + first;
  if (of.in_line && state.kv_heads == 1) {
    read_pairs(reinterpret_cast<const F16*>(rows[0]), count * row, state.inverse, state.scales);
    return;
  }
  if (of.groups_step == head * sizeof(F16) && row >= Vector::kLanes) {
    for (size_t i = 0; i < count; ++i) {
      const auto* halves = reinterpret_cast<const F16*>(rows[i]);
      read_pairs(halves, row, state.inverse, state.scales + i * row);
    }
    return;
  }
  F16* to = state.halves;
  for (size_t i = 0; i < count; ++i) {
    for (size_t at = 0; at < state.kv_heads; ++at, to += head) {
      std::memcpy(to, rows[i] + at * of.groups_step, head * sizeof(F16));
    }
  }
  read_pairs(state.halves, count * row, state.inverse, state.scales);
}

// Four vectors of numbers of a row. The first has the number of the first code of each word, and so
// on. Queries and sums have the same order.
struct UnitNumbers {
  Vector of[kWordCodes];

  template <class Words>
  static CXL_OFFLOAD_VECTOR UnitNumbers read(const Words& words, const Table& table) {
    return {{table.number<4>(words), table.number<0>(words), table.number<12>(words),
             table.number<8>(words)}};
  }
};

struct CodeRows {
  void skip(size_t count) {
    rows += count;
    scales += count * scales_step;
  }

  const std::byte* const* rows;
  size_t head_offset;   // bytes
  const float* scales;  // those of the first row and this head
  size_t scales_step;   // floats from one row to the next

  CXL_OFFLOAD_VECTOR UnitNumbers numbers(size_t row, size_t group, size_t at) const {
    const float* pair = scales + row * scales_step + 2 * group;
    const Table table(pair[0], pair[1]);
    return UnitNumbers::read(load_words(rows[row] + head_offset + at / 2), table);
  }
};

// Computes the scores of N rows for Q queries.
// Long: one loop, whose sums stay in registers.
template <class Cut, size_t N, size_t Q>
CXL_OFFLOAD_VECTOR void score_codes(const CodeRows& rows, const AttentionState& state,
                                    const float* q, float* scores) {
  constexpr size_t kChains = Q == 1 ? 2 : 1;  // independent sums
  Vector sum[Q][kChains][N];
#pragma GCC unroll 16
  for (size_t j = 0; j < Q * kChains * N; ++j) {
    sum[j / N / kChains][j / N % kChains][j % N] = Vector::all(0);
  }
  const size_t groups = Cut::groups(state);
  const size_t codes = Cut::group_codes(state);
#pragma GCC unroll 2
  for (size_t group = 0; group < groups; ++group) {
    for (size_t at = group * codes; at < (group + 1) * codes; at += kUnitCodes) {
#pragma GCC unroll 4
      for (size_t i = 0; i < N; ++i) {
        const UnitNumbers numbers = rows.numbers(i, group, at);
#pragma GCC unroll 4
        for (size_t j = 0; j < Q; ++j) {
#pragma GCC unroll 4
          for (size_t c = 0; c < kWordCodes; ++c) {
            const Vector part = Vector::load(q + j * state.padded + at + c * Vector::kLanes);
            Vector& mine = sum[j][c % kChains][i];
            mine = mul_add(numbers.of[c], part, mine);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (size_t j = 0; j < Q; ++j) {
    if constexpr (kChains == 2) {
#pragma GCC unroll 4
      for (size_t i = 0; i < N; ++i) sum[j][0][i] = add(sum[j][0][i], sum[j][1][i]);
    }
    float* to = scores + j * kAttentionBlock;
    if constexpr (N == 4) {
      Vector::totals(sum[j][0], to);
    } else {
      to[0] = sum[j][0][0].total();
    }
  }
}

// Adds rows, times their weights, to the sums of Q queries. The sums stay in registers.
template <class Cut, size_t Q>
CXL_OFFLOAD_VECTOR void add_codes(const CodeRows& rows, size_t count, const AttentionState& state,
                                  float* sums, const float* weights) {
  const size_t groups = Cut::groups(state);
  const size_t codes = Cut::group_codes(state);
#pragma GCC unroll 2
  for (size_t group = 0; group < groups; ++group) {
    for (size_t at = group * codes; at < (group + 1) * codes; at += kUnitCodes) {
      Vector sum[Q][kWordCodes];
#pragma GCC unroll 16
      for (size_t c = 0; c < Q * kWordCodes; ++c) {
        sum[c / kWordCodes][c % kWordCodes] = Vector::load(sums + c / kWordCodes * state.padded +
                                                           at + c % kWordCodes * Vector::kLanes);
      }
      for (size_t i = 0; i < count; ++i) {
        const UnitNumbers numbers = rows.numbers(i, group, at);
#pragma GCC unroll 4
        for (size_t j = 0; j < Q; ++j) {
          const Vector weight = Vector::all(weights[j * kAttentionBlock + i]);
#pragma GCC unroll 4
          for (size_t c = 0; c < kWordCodes; ++c) {
            sum[j][c] = mul_add(numbers.of[c], weight, sum[j][c]);
          }
        }
      }
#pragma GCC unroll 16
      for (size_t c = 0; c < Q * kWordCodes; ++c) {
        sum[c / kWordCodes][c % kWordCodes].store(sums + c / kWordCodes * state.padded + at +
                                                  c % kWordCodes * Vector::kLanes);
      }
    }
  }
}

#include "kernels/attention_code_sums.inc.h"

// Whether the codes of rows that only one query uses are multiplied before they are scaled. A
// look-up of 16 numbers makes a scaled number in two steps, and then there is nothing to win.
constexpr bool kSumsFirst = Vector::kLanes != 16;

// Computes scores from numbers, for rows whose scales may not be finite.
template <class Cut, size_t N>
__attribute__((noinline)) void score_again(const CodeRows& rows, const AttentionState& state,
                                           const float* q, float* scores) {
  score_codes<Cut, N, 1>(rows, state, q, scores);
}

template <class Cut, size_t N, size_t Q>
CXL_OFFLOAD_VECTOR void score_some(const CodeRows& rows, const AttentionState& state, size_t query,
                                   float* scores) {
  const float* q = state.q + query * state.padded;
  if constexpr (Q == 1 && kSumsFirst) {
    if (score_sums<Cut, N>(rows, state, divided_query<Cut>(state, query), scores)) return;
    score_again<Cut, N>(rows, state, q, scores);
  } else {
    score_codes<Cut, N, Q>(rows, state, q, scores);
  }
}

// Takes rows of one head and Q of its queries. Computes the scores, or adds the rows to the sums.
template <class Cut, bool kScore, size_t Q>
CXL_OFFLOAD_VECTOR void visit_queries(CodeRows rows, size_t count, const AttentionState& state,
                                      size_t query, float* scores) {
  scores += query * kAttentionBlock;
  float* sums = state.sums + query * state.padded;
  if constexpr (kScore) {
    size_t at = 0;
    for (; at + 4 <= count; at += 4, rows.skip(4)) {
      score_some<Cut, 4, Q>(rows, state, query, scores + at);
    }
    for (; at < count; ++at, rows.skip(1)) score_some<Cut, 1, Q>(rows, state, query, scores + at);
  } else if constexpr (Q == 1 && kSumsFirst) {
    add_sums<Cut>(rows, count, state, sums, scores);
  } else {
    add_codes<Cut, Q>(rows, count, state, sums, scores);
  }
}

// Prefetches `bytes` bytes for each of the heads, which are `step` bytes apart.
inline void prefetch_heads(const std::byte* row, size_t heads, size_t step, size_t bytes) {
  if (step == bytes) return prefetch_row(row, heads * bytes);
  for (size_t head = 0; head < heads; ++head) prefetch_row(row + head * step, bytes);
}

// Prefetches a head's share of some rows of all heads, and of their scales: whole rows, one after
// another. A row's lines lie side by side, and memory gives them faster than a line of each row in
// turns: half as fast again on a Zen 4, in FlexGen's layout. `bytes` and `scale_bytes` are what a
// row of one head has.
CXL_OFFLOAD_VECTOR void ask_for_rows(const CodesOf& of, size_t first, size_t count, size_t head,
                                     size_t heads, size_t bytes, size_t scale_bytes) {
  const size_t end = first + count * (head + 1) / heads;
  for (size_t row = first + count * head / heads; row < end; ++row) {
    prefetch_heads(of.rows[row], heads, of.step, bytes);
    prefetch_heads(of.groups[row], heads, of.groups_step, scale_bytes);
  }
}

// Visits all rows of K to compute scores, or all rows of V to add them to the sums.
template <class Cut, bool kScore>
inline void visit(const CodesOf& of, const AttentionRows& all, const AttentionState& state) {
  constexpr size_t kQueries = 4;
  const size_t each = Cut::groups(state) * 2;
  // With many heads side by side, the rows and the prefetched ones have to fit in the nearest
  // cache.
  const size_t rows_each = state.kv_heads == 1 ? kAttentionScaleRows
                           : kSumsFirst        ? kAttentionScaleRows / 2
                                               : kAttentionScaleRows / 4;
  for (size_t from = 0; from < all.count; from += rows_each) {
    const size_t count = std::min(all.count - from, rows_each);
    read_scales<Cut>(of, from, count, state);
    for (size_t head = 0; head < state.kv_heads; ++head) {
      ask_for_rows(of, from + all.ahead, count, head, state.kv_heads, Cut::codes(state) / 2,
                   Cut::groups(state) * 2 * sizeof(F16));
      const CodeRows rows{of.rows + from, head * of.step, state.scales + head * each,
                          state.kv_heads * each};
      size_t query = head * state.group;
      const size_t end = query + state.group;
      float* scores = state.scores + from;
      for (; query + kQueries <= end; query += kQueries) {
        visit_queries<Cut, kScore, kQueries>(rows, count, state, query, scores);
      }
      for (; query < end; ++query) {
        visit_queries<Cut, kScore, 1>(rows, count, state, query, scores);
      }
    }
  }
}

template <class Cut>
inline void attend_cut(const AttentionRows& rows, const AttentionState& state) {
  if constexpr (kSumsFirst) divide_queries<Cut>(state);
  visit<Cut, true>({rows.k, rows.k_groups, rows.k_step, rows.k_groups_step, rows.k_in_line}, rows,
                   state);
  scores_to_weights(rows, state);
  visit<Cut, false>({rows.v, rows.v_groups, rows.v_step, rows.v_groups_step, rows.v_in_line}, rows,
                    state);
}

void attend_codes(const AttentionRows& rows, const AttentionState& state) {
  if (state.group_codes == kGroupCodes && state.groups == 1) {
    attend_cut<Cut<1>>(rows, state);
  } else if (state.group_codes == kGroupCodes && state.groups == 2) {
    attend_cut<Cut<2>>(rows, state);
  } else {
    attend_cut<Cut<0>>(rows, state);
  }
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
    case Dtype::kInt8:  // never a cache
      break;
  }
  return attend<float>;
}
