// Included inside of an anonymous namespace by each instruction set's source, after its Vector.

template <class T>
inline const T* head_of(const std::byte* row, size_t head, size_t step) {
  return reinterpret_cast<const T*>(row + head * step);
}

inline void prefetch_row(const std::byte* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 3);
}

// Scores of N rows from `first` for every query. A row is read to its end before the next, as the
// prefetchers of the hardware like it; the sums of the rows do not wait for each other.
template <class T, size_t N>
inline void score_rows(const AttentionRows& rows, const AttentionState& state, size_t first) {
  const size_t whole = state.dim - state.dim % Vector::kLanes;
  const size_t bytes = state.dim * sizeof(T);
  for (size_t head = 0; head < state.kv_heads; ++head) {
    const T* row[N];
    for (size_t i = 0; i < N; ++i) {
      row[i] = head_of<T>(rows.k[first + i], head, rows.k_step);
      prefetch_row(rows.k[first + i + rows.ahead] + head * rows.k_step, bytes);
    }
    for (size_t query = head * state.group; query < (head + 1) * state.group; ++query) {
      const float* q = state.q + query * state.padded;
      Vector sum[N];
#pragma GCC unroll 4
      for (size_t i = 0; i < N; ++i) {
        Vector mine = Vector::all(0);
        size_t at = 0;
        for (; at < whole; at += Vector::kLanes) {
          mine = fma(Vector::load(row[i] + at), Vector::load(q + at), mine);
        }
        if (at != state.dim) {
          const Vector last = Vector::load_some(row[i] + at, state.dim - at);
          mine = fma(last, Vector::load(q + at), mine);
        }
        sum[i] = mine;
      }
      float* scores = state.scores + query * kAttentionBlock + first;
      if constexpr (N == 4) {
        Vector::totals(sum, scores);
      } else {
        scores[0] = sum[0].total();
      }
    }
  }
}

// Scores become weights relative to the greatest score so far, and the sums with them.
inline void weigh(const AttentionRows& rows, const AttentionState& state) {
  const float lowest = -std::numeric_limits<float>::infinity();
  for (size_t query = 0; query < state.kv_heads * state.group; ++query) {
    float* scores = state.scores + query * kAttentionBlock;
    std::fill(scores + rows.count, scores + kAttentionBlock, lowest);
    Vector top = Vector::all(state.most[query]);
    for (size_t i = 0; i < kAttentionBlock; i += Vector::kLanes) {
      top = larger(Vector::load(scores + i), top);
    }
    const float most = top.greatest();
    // All of them minus infinity: weights of zero rather than NaN.
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

// Adds C vectors of each of N rows, times their weights, to sums that stay in registers.
template <class T, size_t N, size_t C>
inline void add_part(const T* const* row, const float* weights, float* sums, size_t at) {
  Vector sum[C];
#pragma GCC unroll 8
  for (size_t c = 0; c < C; ++c) sum[c] = Vector::load(sums + at + c * Vector::kLanes);
#pragma GCC unroll 1
  for (size_t i = 0; i < N; ++i) {
    const Vector weight = Vector::all(weights[i]);
#pragma GCC unroll 8
    for (size_t c = 0; c < C; ++c) {
      sum[c] = fma(Vector::load(row[i] + at + c * Vector::kLanes), weight, sum[c]);
    }
  }
#pragma GCC unroll 8
  for (size_t c = 0; c < C; ++c) sum[c].store(sums + at + c * Vector::kLanes);
}

template <class T, size_t N>
inline void add_rows(const AttentionRows& rows, const AttentionState& state, size_t first) {
  constexpr size_t kMany = 8;
  const size_t whole = state.dim - state.dim % Vector::kLanes;
  const size_t bytes = state.dim * sizeof(T);
  for (size_t head = 0; head < state.kv_heads; ++head) {
    const T* row[N];
    for (size_t i = 0; i < N; ++i) {
      row[i] = head_of<T>(rows.v[first + i], head, rows.v_step);
      prefetch_row(rows.v[first + i + rows.ahead] + head * rows.v_step, bytes);
    }
    for (size_t query = head * state.group; query < (head + 1) * state.group; ++query) {
      float* sums = state.sums + query * state.padded;
      const float* weights = state.scores + query * kAttentionBlock + first;
      size_t at = 0;
      for (; at + kMany * Vector::kLanes <= whole; at += kMany * Vector::kLanes) {
        add_part<T, N, kMany>(row, weights, sums, at);
      }
      for (; at + 4 * Vector::kLanes <= whole; at += 4 * Vector::kLanes) {
        add_part<T, N, 4>(row, weights, sums, at);
      }
      for (; at < whole; at += Vector::kLanes) add_part<T, N, 1>(row, weights, sums, at);
      if (at == state.dim) continue;
      Vector sum = Vector::load(sums + at);
      for (size_t i = 0; i < N; ++i) {
        const Vector last = Vector::load_some(row[i] + at, state.dim - at);
        sum = fma(last, Vector::all(weights[i]), sum);
      }
      sum.store(sums + at);
    }
  }
}

template <class T>
void attend(const AttentionRows& rows, const AttentionState& state) {
  constexpr size_t kRows = 4;  // a load of q, and of the sums, serves so many
  size_t at = 0;
  for (; at + kRows <= rows.count; at += kRows) score_rows<T, kRows>(rows, state, at);
  for (; at < rows.count; ++at) score_rows<T, 1>(rows, state, at);
  weigh(rows, state);
  at = 0;
  for (; at + kRows <= rows.count; at += kRows) add_rows<T, kRows>(rows, state, at);
  for (; at < rows.count; ++at) add_rows<T, 1>(rows, state, at);
}
