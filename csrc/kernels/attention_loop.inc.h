// The loop of attention over floating-point numbers. The source of each instruction set includes it
// inside of an anonymous namespace, after its Vector.

template <class T>
inline const T* head_of(const std::byte* row, size_t head, size_t step) {
  return reinterpret_cast<const T*>(row + head * step);
}

CXL_OFFLOAD_VECTOR void prefetch_row(const std::byte* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLineBytes) prefetch_second(row + at);
}

// Rows that will be needed soon.
struct SoonRows {
  const std::byte* row(size_t i, size_t head) const { return rows[i] + head * step; }

  // Prefetches bytes of a row.
  CXL_OFFLOAD_VECTOR void prefetch(size_t i, size_t head, size_t begin, size_t bytes) const {
    const std::byte* first = row(i, head) + begin;
    if (into == Prefetch::kSecond) return prefetch_row(first, bytes);
    if (into == Prefetch::kNone) return;
    for (size_t at = 0; at < bytes; at += kLineBytes) prefetch_near(first + at);
  }

  const std::byte* const* rows;
  size_t step;  // bytes from one head to the next
  Prefetch into;
};

// Return the rows to prefetch while `count` rows from row `first` on are read. The rows of V in a
// block follow its rows of K, and the next block's rows of K follow those.
inline SoonRows soon_after_k(const AttentionRows& rows, size_t first, size_t count) {
  const size_t at = first + rows.ahead;
  if (at + count <= rows.count) return {rows.k + at, rows.k_step, rows.prefetch};
  return {rows.v + (std::max(at, rows.count) - rows.count), rows.v_step, rows.prefetch};
}
inline SoonRows soon_after_v(const AttentionRows& rows, size_t first, size_t count) {
  const size_t at = first + rows.ahead;
  if (at + count <= rows.count) return {rows.v + at, rows.v_step, rows.prefetch};
  return {rows.k + std::max(at, rows.count), rows.k_step, rows.prefetch};
}

// So many rows that have become float are used by so many queries of a head at once. Their sums
// have to fit the registers.
constexpr size_t kRowsTogether = 4;
constexpr size_t kTogether = Vector::kLanes == 1 ? 1 : Vector::kRegisters < 32 ? 2 : 4;

// Reads C vectors of a row as float. Two vectors of bfloat16 become one of the even elements and
// one of the odd ones, in the order of pair_place().
template <class T, size_t C, class V>
inline void load_part(const T* from, V (&to)[C]) {
  if constexpr (std::is_same_v<T, Bf16> && C % 2 == 0) {
#pragma GCC unroll 4
    for (size_t c = 0; c < C; c += 2) {
      Vector::load_pair(from + c * Vector::kLanes, to[c], to[c + 1]);
    }
  } else if constexpr (kLoadsTwo<V, T> && C % 2 == 0) {
#pragma GCC unroll 4
    for (size_t c = 0; c < C; c += 2) {
      V::load_two(from + c * V::kLanes, to[c], to[c + 1]);
    }
  } else {
#pragma GCC unroll 8
    for (size_t c = 0; c < C; ++c) to[c] = Vector::load(from + c * Vector::kLanes);
  }
}

// The sums of the scores of N rows for Q queries.
template <class T, size_t N, size_t Q>
struct Scores {
  static constexpr bool kAddsOne = true;  // whether add<1> is faster than add_some()

  Scores(const T* const* row, const float* q, size_t q_step) : row(row), q(q), q_step(q_step) {
#pragma GCC unroll 16
    for (size_t i = 0; i < Q * N; ++i) sum[i / N][i % N] = Vector::all(0);
  }

  // Adds the products of C vectors.
  template <size_t C>
  CXL_OFFLOAD_VECTOR void add(size_t at) {
    Vector part[N][C];
#pragma GCC unroll 8
    for (size_t i = 0; i < N; ++i) load_part<T, C>(row[i] + at, part[i]);
#pragma GCC unroll 4
    for (size_t j = 0; j < Q; ++j) {
#pragma GCC unroll 2
      for (size_t c = 0; c < C; ++c) {
        const Vector number = Vector::load(q + j * q_step + at + c * Vector::kLanes);
#pragma GCC unroll 8
        for (size_t i = 0; i < N; ++i) sum[j][i] = mul_add(part[i][c], number, sum[j][i]);
      }
    }
  }

  // Adds the products of fewer numbers than a vector has.
  CXL_OFFLOAD_VECTOR void add_some(size_t at, size_t count) {
#pragma GCC unroll 8
    for (size_t i = 0; i < N; ++i) {
      const Vector part = Vector::load_some(row[i] + at, count);
#pragma GCC unroll 4
      for (size_t j = 0; j < Q; ++j) {
        sum[j][i] = mul_add(part, Vector::load(q + j * q_step + at), sum[j][i]);
      }
    }
  }

  const T* const* row;
  const float* q;
  size_t q_step;
  Vector sum[Q][N];
};

// Computes the scores of N rows for Q queries, from `query` on.
template <class T, size_t N, size_t Q>
inline void score_queries(const T* const* row, const AttentionState& state, size_t query,
                          size_t first) {
  constexpr size_t kLanes = Vector::kLanes;
  Scores<T, N, Q> scores(row, state.q + query * state.padded, state.padded);
  size_t at = 0;
  for (; at + 2 * kLanes <= state.dim; at += 2 * kLanes) scores.template add<2>(at);
  if constexpr (Scores<T, N, Q>::kAddsOne) {
    if (at + kLanes <= state.dim) {
      scores.template add<1>(at);
      at += kLanes;
    }
  }
  if (at != state.dim) scores.add_some(at, state.dim - at);
#pragma GCC unroll 4
  for (size_t j = 0; j < Q; ++j) {
    float* to = state.scores + (query + j) * kAttentionBlock + first;
    if constexpr (N % 4 == 0) {
#pragma GCC unroll 2
      for (size_t i = 0; i < N; i += 4) Vector::totals(scores.sum[j] + i, to + i);
    } else {
      to[0] = scores.sum[j][0].total();
    }
  }
}

// Computes the scores of N rows of a head for the queries of the head.
template <class T, size_t N>
inline void score_head_rows(const T* const* row, const AttentionState& state, size_t head,
                            size_t first) {
  size_t query = head * state.group;
  const size_t end = query + state.group;
  if constexpr (kTogether > 1) {
    constexpr size_t kRows = std::min(N, kRowsTogether);
    for (; query + kTogether <= end; query += kTogether) {
      for (size_t i = 0; i < N; i += kRows) {
        score_queries<T, kRows, kTogether>(row + i, state, query, first + i);
      }
    }
  }
  for (; query < end; ++query) score_queries<T, N, 1>(row, state, query, first);
}

// Calls visit(rows) with `count` rows of a head, at most N. Some types have a cheaper conversion
// for numbers that are not NaN. It is used where no row has a NaN.
template <class T, size_t N, class Visit>
inline void for_rows(const std::byte* const* rows, size_t count, size_t head, size_t step,
                     size_t dim, const Visit& visit) {
  using NoNan = Vector::NoNan<T>;
  const T* row[N];
  for (size_t i = 0; i < count; ++i) row[i] = head_of<T>(rows[i], head, step);
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

// Rows of a head that are read before those of the next one, where a unit has several. They lie far
// apart, and memory gives a few of them side by side faster than one after another: with 8 instead
// of 4, FlexGen's layout was a sixth faster on one thread of a Zen 4, with 16 it was slower. Those
// of all heads have to fit in the nearest cache.
constexpr size_t kSideBySide = 8;

// Computes the scores of N rows at a time, of rows [first, end), for every query.
template <class T, size_t N>
inline void score_rows(const AttentionRows& rows, const AttentionState& state, size_t first,
                       size_t end) {
  for (size_t head = 0; head < state.kv_heads; ++head) {
    for (size_t at = first; at < end; at += N) {
      const SoonRows soon = soon_after_k(rows, at, N);
      for (size_t i = 0; i < N; ++i) soon.prefetch(i, head, 0, state.dim * sizeof(T));
      for_rows<T, N>(rows.k + at, N, head, rows.k_step, state.dim,
                     [&]<class R>(const R* const* row) __attribute__((always_inline)) {
                       score_head_rows<R, N>(row, state, head, at);
                     });
    }
  }
}

inline void multiply(float* scores, size_t count, float factor) {
  for (size_t at = 0; at < count; at += Vector::kLanes) {
    mul(Vector::load(scores + at), Vector::all(factor)).store(scores + at);
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
  const size_t end = round_up(rows.count, kAttentionPad);  // passes take so many rows together
  for (size_t query = 0; query < state.kv_heads * state.group; ++query) {
    float* scores = state.scores + query * kAttentionBlock;
    if (state.factors != nullptr) multiply(scores, rows.count, state.factors[query]);
    if (state.rules != nullptr) apply_rules(rows, *state.rules, query, scores);
    std::fill(scores + rows.count, scores + end, lowest);
    Vector top = Vector::all(state.most[query]);
    for (size_t i = 0; i < end; i += Vector::kLanes) {
      top = larger(Vector::load(scores + i), top);
    }
    const float most = top.greatest();
    // Where all scores are minus infinity, this makes the weights zero rather than NaN.
    const float base = most == lowest ? 0 : most;
    Vector total = Vector::all(0);
    for (size_t i = 0; i < end; i += Vector::kLanes) {
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

// Some rows of V of one head, and the rows to prefetch while they are read.
template <class T>
struct ValueRows {
  const T* const* row;
  size_t count;
  size_t head;
  SoonRows soon;
};

// Where the sums of some queries are, and the weights of rows for them.
struct Sums {
  float* sums;
  size_t step;  // from one query to the next
  const float* weights;
  bool prefetch;  // whether these queries are the first for which the rows are read
};

// Adds C vectors of each row, times their weights, to sums of Q queries that stay in registers.
template <class T, size_t C, size_t Q>
inline void add_part(const ValueRows<T>& rows, const Sums& to, size_t at) {
  float* sums = to.sums + at;
  Vector sum[Q][C];
#pragma GCC unroll 16
  for (size_t i = 0; i < Q * C; ++i) {
    sum[i / C][i % C] = Vector::load(sums + i / C * to.step + i % C * Vector::kLanes);
  }
  for (size_t i = 0; i < rows.count; ++i) {
    Vector part[C];
    load_part<T, C>(rows.row[i] + at, part);
    if (to.prefetch) {
      rows.soon.prefetch(i, rows.head, at * sizeof(T), C * Vector::kLanes * sizeof(T));
    }
#pragma GCC unroll 4
    for (size_t j = 0; j < Q; ++j) {
      const Vector weight = Vector::all(to.weights[j * kAttentionBlock + i]);
#pragma GCC unroll 8
      for (size_t c = 0; c < C; ++c) sum[j][c] = mul_add(part[c], weight, sum[j][c]);
    }
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < Q * C; ++i) {
    sum[i / C][i % C].store(sums + i / C * to.step + i % C * Vector::kLanes);
  }
}

// Adds rows to the sums of Q queries.
template <class T, size_t Q>
inline void add_to_queries(const ValueRows<T>& rows, const Sums& to, size_t dim) {
  constexpr size_t kLanes = Vector::kLanes;
  size_t at = 0;
  if constexpr (Q == 1) {
    for (; at + 8 * kLanes <= dim; at += 8 * kLanes) add_part<T, 8, Q>(rows, to, at);
  }
  for (; at + 4 * kLanes <= dim; at += 4 * kLanes) add_part<T, 4, Q>(rows, to, at);
  for (; at + 2 * kLanes <= dim; at += 2 * kLanes) add_part<T, 2, Q>(rows, to, at);
  for (; at + kLanes <= dim; at += kLanes) add_part<T, 1, Q>(rows, to, at);
  if (at == dim) return;
  for (size_t j = 0; j < Q; ++j) {
    float* sums = to.sums + j * to.step + at;
    Vector sum = Vector::load(sums);
    for (size_t i = 0; i < rows.count; ++i) {
      const Vector last = Vector::load_some(rows.row[i] + at, dim - at);
      sum = mul_add(last, Vector::all(to.weights[j * kAttentionBlock + i]), sum);
    }
    sum.store(sums);
  }
}

// Adds rows, from row `first` of the block on, to the sums of the queries of their head.
template <class T>
inline void add_head_rows(const ValueRows<T>& rows, const AttentionState& state, size_t first) {
  const size_t begin = rows.head * state.group, end = begin + state.group;
  size_t query = begin;
  const auto sums = [&]() __attribute__((always_inline)) {
    return Sums{state.sums + query * state.padded, state.padded,
                state.scores + query * kAttentionBlock + first, query == begin};
  };
  if constexpr (kTogether > 1) {
    for (; query + kTogether <= end; query += kTogether) {
      add_to_queries<T, kTogether>(rows, sums(), state.dim);
    }
  }
  for (; query < end; ++query) add_to_queries<T, 1>(rows, sums(), state.dim);
}

// `K` says how rows of K become scores, `T` is the type of the numbers in rows of V.
template <class T, class K = T>
void attend(const AttentionRows& rows, const AttentionState& state) {
  const size_t eights = rows.count / kSideBySide * kSideBySide;
  for (size_t at = 0; at < eights; at += kSideBySide) {
    score_rows<K, kSideBySide>(rows, state, at, at + kSideBySide);
  }
  const size_t fours = rows.count / kRowsTogether * kRowsTogether;
  score_rows<K, kRowsTogether>(rows, state, eights, fours);
  score_rows<K, 1>(rows, state, fours, rows.count);
  scores_to_weights(rows, state);
  constexpr size_t kMost = 16;  // the rows that one load of the sums is used for
  const size_t each = state.kv_heads == 1 ? kMost : kSideBySide;
  for (size_t from = 0; from < rows.count; from += each) {
    const size_t count = std::min(rows.count - from, each);
    const SoonRows soon = soon_after_v(rows, from, count);
    for (size_t head = 0; head < state.kv_heads; ++head) {
      for_rows<T, kMost>(rows.v + from, count, head, rows.v_step, state.dim,
                         [&]<class R>(const R* const* row) __attribute__((always_inline)) {
                           add_head_rows<R>({row, count, head, soon}, state, from);
                         });
    }
  }
}
