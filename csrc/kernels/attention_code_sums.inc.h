// Attention over rows of 4-bit codes, with the scales applied to sums rather than to each code:
//   sum of q * (code * step + low) = step * (sum of q * code) + low * (sum of q)
//   sum of weight * (code * step + low) = sum of (weight * step) * code + sum of weight * low
// Included by attention_codes.inc.h, for instruction sets that have no look-up of 16 numbers.
//
// A code becomes a number where it stands in its word, without a shift, so the number is 2^shift
// times the code. Queries are divided by these powers of two before, and sums of values after. Both
// are exact, except for numbers of q below 2^-114, whose scores are nothing beside any other.

// The first bits of the codes of a word, in the order of UnitNumbers.
constexpr int kCodeShift[kWordCodes] = {4, 0, 12, 8};
constexpr float kOverShift[kWordCodes] = {1.0f / 16, 1, 1.0f / 4096, 1.0f / 256};

// The words that one load reads.
struct UnitCodes {
  template <size_t kCode>
  CXL_OFFLOAD_VECTOR Vector at() const {
    return shifted_code<kCodeShift[kCode]>(words);
  }
  decltype(load_words(nullptr)) words;
};

// Where a query of AttentionState::divided begins: its numbers, and a vector for each group whose
// lanes add up to the sum of the group's numbers.
template <class Cut>
inline float* divided_query(const AttentionState& state, size_t query) {
  return state.divided + query * (Cut::codes(state) + Cut::groups(state) * Vector::kLanes);
}

template <class Cut>
inline void divide_queries(const AttentionState& state) {
  const size_t codes = Cut::group_codes(state);
  for (size_t query = 0; query < state.kv_heads * state.group; ++query) {
    const float* q = state.q + query * state.padded;
    float* to = divided_query<Cut>(state, query);
    for (size_t group = 0; group < Cut::groups(state); ++group) {
      Vector sum = Vector::all(0);
      for (size_t at = group * codes; at < (group + 1) * codes; at += kUnitCodes) {
        for (size_t c = 0; c < kWordCodes; ++c) {
          const Vector number = Vector::load(q + at + c * Vector::kLanes);
          mul(number, Vector::all(kOverShift[c])).store(to + at + c * Vector::kLanes);
          sum = add(sum, number);
        }
      }
      sum.store(to + Cut::codes(state) + group * Vector::kLanes);
    }
  }
}

// Returns whether all numbers are finite.
template <size_t N>
CXL_OFFLOAD_VECTOR bool all_finite(const float* numbers) {
  float odd = 0;
#pragma GCC unroll 4
  for (size_t i = 0; i < N; ++i) odd += numbers[i] * 0;
  return odd == 0;
}

// Multiplies the codes of a unit of N rows by those of a query. The sums of all rows advance
// together, because each is a chain of steps that wait for one another.
template <size_t N>
CXL_OFFLOAD_VECTOR void multiply_units(const CodeRows& rows, size_t at, const float* q,
                                       Vector (&sum)[N]) {
  UnitCodes unit[N];
#pragma GCC unroll 4
  for (size_t i = 0; i < N; ++i) {
    unit[i].words = load_words(rows.rows[i] + rows.head_offset + at / 2);
  }
  const auto add_code = [&]<size_t kCode>() __attribute__((always_inline)) {
    const Vector number = Vector::load(q + at + kCode * Vector::kLanes);
#pragma GCC unroll 4
    for (size_t i = 0; i < N; ++i) {
      const Vector code = unit[i].template at<kCode>();
      sum[i] = kCode == 0 ? mul(code, number) : mul_add(code, number, sum[i]);
    }
  };
  add_code.template operator()<0>();
  add_code.template operator()<1>();
  add_code.template operator()<2>();
  add_code.template operator()<3>();
}

// Computes the scores of N rows for one query. Returns whether all of them are finite. Where they
// are not, a scale may be infinite, and then these sums are not those of the numbers.
template <class Cut, size_t N>
CXL_OFFLOAD_VECTOR bool score_sums(const CodeRows& rows, const AttentionState& state,
                                   const float* q, float* scores) {
  Vector score[N];
#pragma GCC unroll 4
  for (size_t i = 0; i < N; ++i) score[i] = Vector::all(0);
  const size_t groups = Cut::groups(state);
  const size_t codes = Cut::group_codes(state);
#pragma GCC unroll 2
  for (size_t group = 0; group < groups; ++group) {
    const Vector sum_q = Vector::load(q + Cut::codes(state) + group * Vector::kLanes);
    const float* pair = rows.scales + 2 * group;
#pragma GCC unroll 4
    for (size_t i = 0; i < N; ++i) {
      score[i] = mul_add(sum_q, Vector::all(pair[i * rows.scales_step + 1]), score[i]);
    }
#pragma GCC unroll 2
    for (size_t at = group * codes; at < (group + 1) * codes; at += kUnitCodes) {
      Vector sum[N];
      multiply_units<N>(rows, at, q, sum);
#pragma GCC unroll 4
      for (size_t i = 0; i < N; ++i) {
        score[i] = mul_add(sum[i], Vector::all(pair[i * rows.scales_step]), score[i]);
      }
    }
  }
  if constexpr (N == 4) {
    Vector::totals(score, scores);
  } else {
    scores[0] = score[0].total();
  }
  return all_finite<N>(scores);
}

// Sums of a part of a group, without its lows, and the sum of weights times lows.
struct PartSums {
  static constexpr size_t kUnits = 2;  // a group has an even number of units
  static constexpr size_t kSums = kUnits * kWordCodes;

  CXL_OFFLOAD_VECTOR PartSums() : lows(Vector::all(0)) {
#pragma GCC unroll 8
    for (size_t c = 0; c < kSums; ++c) sum[c] = Vector::all(0);
  }

  CXL_OFFLOAD_VECTOR void add_row(const std::byte* row, const float* pair, float times) {
    const Vector weight = Vector::all(times);
    const Vector step = mul(weight, Vector::all(pair[0]));
    lows = mul_add(weight, Vector::all(pair[1]), lows);
#pragma GCC unroll 2
    for (size_t u = 0; u < kUnits; ++u) {
      const UnitCodes unit{load_words(row + u * kUnitCodes / 2)};
      Vector* mine = sum + u * kWordCodes;
      mine[0] = mul_add(unit.at<0>(), step, mine[0]);
      mine[1] = mul_add(unit.at<1>(), step, mine[1]);
      mine[2] = mul_add(unit.at<2>(), step, mine[2]);
      mine[3] = mul_add(unit.at<3>(), step, mine[3]);
    }
  }

  CXL_OFFLOAD_VECTOR void add_to(float* sums) const {
#pragma GCC unroll 8
    for (size_t c = 0; c < kSums; ++c) {
      float* to = sums + c * Vector::kLanes;
      const Vector before = add(Vector::load(to), lows);
      mul_add(sum[c], Vector::all(kOverShift[c % kWordCodes]), before).store(to);
    }
  }

  Vector sum[kSums];
  Vector lows;
};

// Adds rows, times their weights, to the sums of one query. What is not finite ends in the sums as
// it would with numbers.
template <class Cut>
CXL_OFFLOAD_VECTOR void add_sums(const CodeRows& rows, size_t count, const AttentionState& state,
                                 float* sums, const float* weights) {
  const size_t groups = Cut::groups(state);
  const size_t codes = Cut::group_codes(state);
#pragma GCC unroll 2
  for (size_t group = 0; group < groups; ++group) {
    for (size_t at = group * codes; at < (group + 1) * codes; at += PartSums::kUnits * kUnitCodes) {
      PartSums part;
      const float* pair = rows.scales + 2 * group;
      for (size_t i = 0; i < count; ++i, pair += rows.scales_step) {
        part.add_row(rows.rows[i] + rows.head_offset + at / 2, pair, weights[i]);
      }
      part.add_to(sums + at);
    }
  }
}
