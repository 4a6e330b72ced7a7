// The scales of 4-bit codes, and the ends of strips, where a register has eight codes of every
// lane: rows have a multiple of 128 codes, and groups have 32, 64 or a multiple of 128. The sources
// include this file inside of an unnamed namespace, after linear_order.inc.h. They have defined
// kCodeOffset: codes are read as so much more than they are.

// What one thread needs while it multiplies a panel of 4-bit codes. Each row of the first three
// arrays has groups_of() numbers: one for each group, then zeros.
struct Room {
  Kept<float> steps;            // [outputs][groups], and more
  Kept<float> lows;             // [outputs][groups]: low - kCodeOffset * step
  Kept<float> sums;             // [rows][groups]: sums of x
  Kept<uint32_t> first_groups;  // the first group of each block of weights
  // Which step each eight codes of a block have, counted from the block's first step.
  alignas(kLineBytes) int32_t scale_places[16];
};

inline Room& room_of_this_thread() {
  static thread_local Room room;
  return room;
}

// Returns how many groups a row has, rounded up to whole vectors.
CXL_OFFLOAD_VECTOR size_t groups_of(const LinearPanel& panel) {
  return (panel.width / panel.group + Vector::kLanes - 1) / Vector::kLanes * Vector::kLanes;
}

// Reads the scales of a panel.
inline void read_scales(const LinearPanel& panel, Room& room) {
  const size_t count = groups_of(panel), pairs = 2 * (panel.width / panel.group);
  float* steps = room.steps.of(panel.outputs * count + kLinearPad);
  float* lows = room.lows.of(panel.outputs * count);
  for (size_t i = 0; i < 16; ++i) {
    room.scale_places[i] = static_cast<int32_t>(i * 8 / panel.group);
  }
  room.first_groups.of(panel.width / 128);
  for (size_t at = 0; at < panel.width; at += 128) {
    room.first_groups.data[at / 128] = static_cast<uint32_t>(at / panel.group);
  }
  const __m512i evens =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
  for (size_t output = 0; output < panel.outputs; ++output) {
    const F16* from = panel.pairs + output * panel.pairs_step;
    for (size_t at = 0; at < count; at += Vector::kLanes) {
      const size_t left = pairs - 2 * at;
      const __m512 first = load_pairs(from + 2 * at, left, panel.form).value;
      __m512 second = _mm512_setzero_ps();
      if (left > 16) second = load_pairs(from + 2 * at + 16, left - 16, panel.form).value;
      const __mmask16 there = Vector::first(std::min(left / 2, Vector::kLanes));
      const __m512 step = _mm512_maskz_mov_ps(there, _mm512_permutex2var_ps(first, evens, second));
      const __m512 low = _mm512_maskz_mov_ps(there, _mm512_permutex2var_ps(first, odds, second));
      _mm512_storeu_ps(steps + output * count + at, step);
      _mm512_storeu_ps(lows + output * count + at,
                       _mm512_fnmadd_ps(step, _mm512_set1_ps(kCodeOffset), low));
    }
  }
}

// Adds what the lows of groups contribute to the sums of a strip: their products with the sums of x
// over the groups, which a row of the tile has `sums_apart` after those of the row before.
template <size_t M, size_t R>
CXL_OFFLOAD_VECTOR void add_lows(const LinearPanel& panel, const Room& room, const Step& step,
                                 const float* sums, size_t sums_apart, Vector (&sum)[M][R]) {
  const size_t count = groups_of(panel);
  const float* lows = room.lows.data.get() + step.output * count;
  for (size_t at = 0; at < count; at += Vector::kLanes) {
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
      const Vector low = Vector::load(lows + r * step.apart * count + at);
#pragma GCC unroll 8
      for (size_t m = 0; m < M; ++m) {
        sum[m][r] = fma(low, Vector::load(sums + m * sums_apart + at), sum[m][r]);
      }
    }
  }
}

// Writes the sums of a strip where the panel has them.
template <size_t M, size_t R>
CXL_OFFLOAD_VECTOR void write_totals(const LinearPanel& panel, const Step& step,
                                     const Vector (&sum)[M][R]) {
  float* to = panel.sums + step.row * panel.outputs + step.output;
#pragma GCC unroll 8
  for (size_t m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) to[m * panel.outputs + r * step.apart] = sum[m][r].total();
  }
}
