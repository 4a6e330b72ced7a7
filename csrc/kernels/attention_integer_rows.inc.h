// Goes over all rows of a block, of one head or of many heads that lie side by side. Included by
// attention_integers.inc.h.

// Computes the scores of 16 rows. The first row is `row` in `of` and `from` among the scores.
template <size_t kGroups>
CXL_OFFLOAD_VECTOR void score_head(const CodesOf& of, size_t row, bool in_line, size_t from,
                                   size_t head, const AttentionState& state) {
  __m512i halves[kGroups];
  load_halves<kGroups>(of.groups + row, head * of.groups_step, in_line, halves);
  const auto scales = scales_of<kGroups>(halves, state.inverse);
  for (size_t query = head * state.group; query < (head + 1) * state.group; ++query) {
    float* scores = state.scores + query * kAttentionBlock + from;
    const WholeQuery& whole = state.whole[query];
    const size_t offset = head * of.step;
    if (whole.fits && score_16<kGroups>(of.rows + row, offset, scales, whole, scores)) continue;
    score_numbers<kGroups>(of, row, head, state, query, scores);
  }
}

// Adds `count` rows to the sums of one query whose weights are whole numbers already.
template <size_t kGroups, class Weights>
CXL_OFFLOAD_VECTOR void add_query(const CodesOf& of, size_t count, size_t ahead, size_t from,
                                  size_t query, const Weights& weights,
                                  const AttentionState& state) {
  const size_t head = query / state.group;
  if (weights.finite) {
    float* sums = state.sums + query * state.padded;
    add_chunk<kGroups>(of, 0, count, ahead, head, weights, sums);
  } else {
    const float* scores = state.scores + query * kAttentionBlock + from;
    add_numbers<kGroups>(of, 0, count, head, state, query, scores);
  }
}

// Adds all rows of the only head to the sums of its queries.
template <size_t kGroups>
CXL_OFFLOAD_VECTOR void add_all(const CodesOf& of, size_t count, size_t ahead,
                                const AttentionState& state) {
  WholeWeights<kGroups, kAttentionCodesBlock> weights;
  for (size_t query = 0; query < state.group; ++query) {
    weights.make(of, 0, count, 0, state.inverse, state.scores + query * kAttentionBlock);
    add_query<kGroups>(of, count, query == 0 ? ahead : 0, 0, query, weights, state);
  }
}

// Copies of rows of many heads that lie side by side. The rows of one head are pages apart, so they
// would compete for a few places of the nearest cache. The copies are one cache line further apart
// than a row is long, and so have different places.
template <size_t kGroups>
struct StagedRows {
  static constexpr size_t kRowBytes = 32 * kGroups;
  static constexpr size_t kScaleBytes = scale_bytes(kGroups);

  explicit StagedRows(const AttentionState& state) {
    const size_t row = state.kv_heads * kRowBytes + kLineBytes;
    const size_t scales = state.kv_heads * kScaleBytes + kLineBytes;
    for (size_t i = 0; i < kStagedRows; ++i) {
      rows[i] = state.staged + i * row;
      groups[i] = state.staged + kStagedRows * row + i * scales;
    }
  }

  CodesOf of() const { return {rows, groups, kRowBytes, kScaleBytes, false}; }

  CXL_OFFLOAD_VECTOR void read(const CodesOf& from, size_t row, size_t heads) {
    for (size_t i = 0; i < kStagedRows; ++i, ++row) {
      const std::byte* code = from.rows[row];
      auto* to = const_cast<std::byte*>(rows[i]);
      for (size_t head = 0; head < heads; ++head) {
        std::memcpy(to + head * kRowBytes, code + head * from.step, kRowBytes);
      }
      code = from.groups[row];
      to = const_cast<std::byte*>(groups[i]);
      for (size_t head = 0; head < heads; ++head) {
        std::memcpy(to + head * kScaleBytes, code + head * from.groups_step, kScaleBytes);
      }
    }
  }

  // Prefetches a head's share of the rows to copy next while this thread computes.
  static void ask_for(const CodesOf& of, size_t row, size_t head, size_t heads) {
    ask_for_rows(of, row, kStagedRows, head, heads, kRowBytes, kScaleBytes);
  }

  const std::byte* rows[kStagedRows];
  const std::byte* groups[kStagedRows];
};

// Adds the copied rows of many heads. It first turns the weights of all queries into whole numbers:
// each query takes a long chain of dependent steps, and the processor works on many chains at once.
template <size_t kGroups>
CXL_OFFLOAD_VECTOR void add_staged(const CodesOf& of, const CodesOf& next, size_t from,
                                   const AttentionState& state) {
  WholeWeights<kGroups, kStagedRows> weights[kTileQueries];
  for (size_t query = 0; query < state.kv_heads * state.group; ++query) {
    const float* scores = state.scores + query * kAttentionBlock + from;
    weights[query].make(of, 0, kStagedRows, query / state.group, state.inverse, scores);
  }
  for (size_t query = 0; query < state.kv_heads * state.group; ++query) {
    if (query % state.group == 0) {
      StagedRows<kGroups>::ask_for(next, from + kStagedRows, query / state.group, state.kv_heads);
    }
    add_query<kGroups>(of, kStagedRows, 0, from, query, weights[query], state);
  }
}

// Visits all rows of K to compute scores, or all rows of V to add them to the sums. Rows come in
// multiples of 16. Those beyond the last have valid addresses but do not count: their scores are
// not used, and their weights are zero.
template <size_t kGroups, bool kScore>
inline void visit_integers(const CodesOf& of, const AttentionRows& all,
                           const AttentionState& state) {
  if (state.kv_heads != 1) {
    StagedRows<kGroups> staged(state);
    for (size_t from = 0; from < all.count; from += kStagedRows) {
      staged.read(of, from, state.kv_heads);
      if constexpr (kScore) {
        for (size_t head = 0; head < state.kv_heads; ++head) {
          staged.ask_for(of, from + kStagedRows, head, state.kv_heads);
          score_head<kGroups>(staged.of(), 0, false, from, head, state);
        }
      } else {
        add_staged<kGroups>(staged.of(), of, from, state);
      }
    }
  } else if constexpr (kScore) {
    for (size_t from = 0; from < all.count; from += 16) {
      ask_for<kGroups, 16>(of, from, all.ahead);
      score_head<kGroups>(of, from, of.in_line && from + 16 <= all.count, from, 0, state);
    }
  } else {
    add_all<kGroups>(of, all.count, all.ahead, state);
  }
}
