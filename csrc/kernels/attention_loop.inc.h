// The loop of attention over floating-point numbers. The source of each instruction set includes it
// inside of an anonymous namespace, after its Vector.

template <class T>
inline const T* head_of(const std::byte* row, size_t head, size_t step) {
  return reinterpret_cast<const T*>(row + head * step);
}

inline void prefetch_row(const std::byte* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(row + at, 0, 3);
}

// Computes the scores of N rows of a head for the queries of the head, as N independent sums.
template <class T, size_t N>
inline void score_head_rows(const T* const* row, const AttentionState& state, size_t head,
                            size_t first) {
  const size_t whole = state.dim - state.dim % Vector::kLanes;
  for (size_t query = head * state.group; query < (head + 1) * state.group; ++query) {
    const float* q = state.q + query * state.padded;
    Vector sum[N];
#pragma GCC unroll 4
    for (size_t i = 0; i < N; ++i) sum[i] = Vector::all(0);
    size_t at = 0;
#pragma GCC unroll 2
    for (; at < whole; at += Vector::kLanes) {
      const Vector part = Vector::load(q + at);
#pragma GCC unroll 4
      for (size_t i = 0; i < N; ++i) sum[i] = mul_add(Vector::load(row[i] + at), part, sum[i]);
    }
    if (at != state.dim) {
      const Vector part = Vector::load(q + at);
#pragma GCC unroll 4
      for (size_t i = 0; i < N; ++i) {
        sum[i] = mul_add(Vector::load_some(row[i] + at, state.dim - at), part, sum[i]);
      }
    }
    float* scores = state.scores + query * kAttentionBlock + first;
    if constexpr (N == 4) {
      Vector::totals(sum, scores);
    } else {
      scores[0] = sum[0].total();
    }
  }
}

// Calls visit(rows) with `count` rows of a head, at most N, and prefetches later ones. Some types
// have a cheaper conversion for numbers that are not NaN. It is used where no row has a NaN.
template <class T, size_t N, class Visit>
inline void for_rows(const std::byte* const* rows, size_t count, size_t head, size_t step,
                     size_t ahead, size_t dim, const Visit& visit) {
  using NoNan = Vector::NoNan<T>;
  const T* row[N];
  for (size_t i = 0; i < count; ++i) {
    row[i] = head_of<T>(rows[i], head, step);
    prefetch_row(rows[i + ahead] + head * step, dim * sizeof(T));
  }
  if constexpr (!std::is_same_v<NoNan, T>) {
    if (!NoNan::any_nan(row, count, dim)) {
      const NoNan* plain[N];
      for (size_t i = 0; i < count; ++i) plain[i] = reinterpret_cast<const NoNan*>(row[i]);
      visit(plain);
      return;
    }
  }
  visit(row);
}

// Computes the scores of N rows, from row `first` on, for every query.
template <class T, size_t N>
inline void score_rows(const AttentionRows& rows, const AttentionState& state, size_t first) {
  for (size_t head = 0; head < state.kv_heads; ++head) {
    for_rows<T, N>(rows.k + first, N, head, rows.k_step, rows.ahead, state.dim,
                   [&]<class R>(const R* const* row) __attribute__((always_inline)) {
                     score_head_rows<R, N>(row, state, head, first);
                   });
  }
}

// Turns scores into cap * tanh(score / cap). It takes exponentials only of numbers that are not
// above zero, so none overflows.
inline void cap_scores(float* scores, size_t count, float cap) {
  for (size_t at = 0; at < count; at += Vector::kLanes) {
    const Vector part = mul(Vector::load(scores + at), Vector::all(1 / cap));
    const Vector twice = mul(larger(part, mul(part, Vector::all(-1))), Vector::all(-2));
    const Vector power = exponential(twice);
    const Vector size =
        div(add(Vector::all(1), mul(power, Vector::all(-1))), add(Vector::all(1), power));
    mul(mul(size, sign(part)), Vector::all(cap)).store(scores + at);
  }
}

// Applies the rules to the scores of one query. `query` is its number among those of the unit.
inline void apply_rules(const AttentionRows& rows, const ScoreRules& rules, size_t query,
                        float* scores) {
  if (rules.soft_cap != 0) cap_scores(scores, rows.count, rules.soft_cap);
  const auto head = static_cast<int64_t>(query / rules.queries);
  const auto own = static_cast<int64_t>(query % rules.queries);
  if (rules.bias != nullptr) {
    const float* bias = rules.bias + head * rules.head_step + own * rules.query_step;
    for (size_t i = 0; i < rows.count; ++i) scores[i] += bias[rows.positions[i] * rules.step];
  }
  if (!rules.limited) return;
  for (size_t i = 0; i < rows.count; ++i) {
    const bool seen = rows.positions[i] >= rules.begin + own && rows.positions[i] < rules.end + own;
    if (!seen) scores[i] = -std::numeric_limits<float>::infinity();
  }
}

// Turns scores into weights relative to the greatest score so far, and rescales the sums to it.
inline void scores_to_weights(const AttentionRows& rows, const AttentionState& state) {
  const float lowest = -std::numeric_limits<float>::infinity();
  for (size_t query = 0; query < state.kv_heads * state.group; ++query) {
    float* scores = state.scores + query * kAttentionBlock;
    if (state.rules != nullptr) apply_rules(rows, *state.rules, query, scores);
    std::fill(scores + rows.count, scores + kAttentionBlock, lowest);
    Vector top = Vector::all(state.most[query]);
    for (size_t i = 0; i < kAttentionBlock; i += Vector::kLanes) {
      top = larger(Vector::load(scores + i), top);
    }
    const float most = top.greatest();
    // Where all scores are minus infinity, this makes the weights zero rather than NaN.
    const float base = most == lowest ? 0 : most;
    Vector total = Vector::all(0);
    for (size_t i = 0; i < kAttentionBlock; i += Vector::kLanes) {
      const Vector weight = exponential(add(Vector::load(scores + i), Vector::all(-base)));
      weight.store(scores + i);
      total = add(total, weight);
    }
    const float shrink = std::exp(state.most[query] - base);
    state.total[query] = state.total[query] * shrink + total.total();
    if (shrink != 1) {
      float* sums = state.sums + query * state.padded;
      for (size_t at = 0; at < state.padded; at += Vector::kLanes) {
        mul(Vector::load(sums + at), Vector::all(shrink)).store(sums + at);
      }
    }
    state.most[query] = most;
  }
}

// Adds C vectors of each of some rows, times their weights, to sums that stay in registers.
template <class T, size_t C>
inline void add_part(const T* const* row, size_t count, const float* weights, float* sums,
                     size_t at) {
  Vector sum[C];
#pragma GCC unroll 8
  for (size_t c = 0; c < C; ++c) sum[c] = Vector::load(sums + at + c * Vector::kLanes);
  for (size_t i = 0; i < count; ++i) {
    const Vector weight = Vector::all(weights[i]);
    const T* from = row[i] + at;
#pragma GCC unroll 8
    for (size_t c = 0; c < C; ++c) {
      sum[c] = mul_add(Vector::load(from + c * Vector::kLanes), weight, sum[c]);
    }
  }
#pragma GCC unroll 8
  for (size_t c = 0; c < C; ++c) sum[c].store(sums + at + c * Vector::kLanes);
}

// Adds rows of a head to the sums of its queries.
template <class T>
inline void add_head_rows(const T* const* row, size_t count, const AttentionState& state,
                          size_t head, size_t first) {
  constexpr size_t kMany = 8;
  const size_t whole = state.dim - state.dim % Vector::kLanes;
  for (size_t query = head * state.group; query < (head + 1) * state.group; ++query) {
    float* sums = state.sums + query * state.padded;
    const float* weights = state.scores + query * kAttentionBlock + first;
    size_t at = 0;
    for (; at + kMany * Vector::kLanes <= whole; at += kMany * Vector::kLanes) {
      add_part<T, kMany>(row, count, weights, sums, at);
    }
    for (; at + 4 * Vector::kLanes <= whole; at += 4 * Vector::kLanes) {
      add_part<T, 4>(row, count, weights, sums, at);
    }
    for (; at < whole; at += Vector::kLanes) add_part<T, 1>(row, count, weights, sums, at);
    if (at == state.dim) continue;
    Vector sum = Vector::load(sums + at);
    for (size_t i = 0; i < count; ++i) {
      const Vector last = Vector::load_some(row[i] + at, state.dim - at);
      sum = mul_add(last, Vector::all(weights[i]), sum);
    }
    sum.store(sums + at);
  }
}

template <class T>
void attend(const AttentionRows& rows, const AttentionState& state) {
  constexpr size_t kRows = 4;  // the rows that one load of q is used for
  size_t at = 0;
  for (; at + kRows <= rows.count; at += kRows) score_rows<T, kRows>(rows, state, at);
  for (; at < rows.count; ++at) score_rows<T, 1>(rows, state, at);
  scores_to_weights(rows, state);
  // The rows that one load of the sums is used for. With several heads it is fewer rows, because
  // the rows of all these heads have to fit in the nearest cache.
  constexpr size_t kMost = 16;
  const size_t each = state.kv_heads == 1 ? kMost : kRows;
  for (size_t from = 0; from < rows.count; from += each) {
    const size_t count = std::min(rows.count - from, each);
    for (size_t head = 0; head < state.kv_heads; ++head) {
      for_rows<T, kMost>(rows.v + from, count, head, rows.v_step, rows.ahead, state.dim,
                         [&]<class R>(const R* const* row) __attribute__((always_inline)) {
                           add_head_rows<R>(row, count, state, head, from);
                         });
    }
  }
}
