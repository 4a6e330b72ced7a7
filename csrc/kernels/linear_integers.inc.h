// Layers of 4-bit codes by products of integers (vpdpbusd), for x of any type.
// linear_integers_avx512.cc includes this file inside of an unnamed namespace, after
// linear_codes_room.inc.h.
//
// Each number of x becomes a whole number of 24 bits, with one unit for every 128 numbers. A whole
// number has three signed digits of one byte, which stand for 65536, 256 and 1, and vpdpbusd
// multiplies 64 such bytes by 64 codes at a time. So the codes never become floating-point numbers,
// which takes more instructions than products of one row do. Rounding changes a number of x by at
// most g / (2 * kMostWhole), where g is the greatest of the 128.

constexpr size_t kDigits = 3;
constexpr size_t kBlock = 128;         // codes in a register
constexpr int kMostWhole = 8'300'000;  // 127 * 65536, less a margin for rounding
constexpr float kSmallest = 1e-31f;    // the least divisor
constexpr size_t kTogetherOutputs = 4;

// 128 numbers of x. The two parts of a digit are those of the even and of the odd numbers, as a
// byte has the even code in its upper half. It takes the place of the numbers as float.
struct WholeBlock {
  int8_t digits[kDigits][2][kBlock / 2];
  float unit;
  float unused[kBlock - 1 - kDigits * kBlock / sizeof(float)];
};
static_assert(sizeof(WholeBlock) == kBlock * sizeof(float));

// Writes one digit of 128 numbers; `numbers` has the digits of 16 of them in every 16 bytes.
CXL_OFFLOAD_VECTOR void write_digit(const __m128i (&numbers)[8], int8_t (&to)[2][kBlock / 2]) {
#pragma GCC unroll 2
  for (size_t part = 0; part < 2; ++part) {
    __m512i half = _mm512_castsi128_si512(numbers[4 * part]);
    half = _mm512_inserti32x4(half, numbers[4 * part + 1], 1);
    half = _mm512_inserti32x4(half, numbers[4 * part + 2], 2);
    half = _mm512_inserti32x4(half, numbers[4 * part + 3], 3);
    _mm256_storeu_si256((__m256i*)(to[0] + 32 * part), _mm512_cvtepi16_epi8(half));
    _mm256_storeu_si256((__m256i*)(to[1] + 32 * part),
                        _mm512_cvtepi16_epi8(_mm512_srli_epi16(half, 8)));
  }
}

// Turns 128 numbers into whole ones, in their place. If one is infinite or NaN, products with them
// are NaN.
CXL_OFFLOAD_VECTOR void make_whole(float* numbers) {
  __m512 part[8];
  __m512 most = _mm512_setzero_ps();
  __mmask16 odd = 0;
#pragma GCC unroll 8
  for (size_t i = 0; i < 8; ++i) {
    part[i] = _mm512_loadu_ps(numbers + 16 * i);
    most = _mm512_max_ps(most, _mm512_abs_ps(part[i]));
    odd |= _mm512_fpclass_ps_mask(part[i], 0x99);  // NaN or infinite
  }
  const float greatest = std::max(_mm512_reduce_max_ps(most), kSmallest);
  const __m512 factor = _mm512_set1_ps(odd != 0 ? 0.0f : kMostWhole / greatest);
  // The bytes of the sum are the digits, each more by 128, which changes its highest bit only.
  const __m512i half = _mm512_set1_epi32(0x808080);
  __m128i digit[kDigits][8];
#pragma GCC unroll 8
  for (size_t i = 0; i < 8; ++i) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], factor));
    const __m512i digits = _mm512_xor_si512(_mm512_add_epi32(whole, half), half);
    digit[2][i] = _mm512_cvtepi32_epi8(digits);
    digit[1][i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(digits, 8));
    digit[0][i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(digits, 16));
  }
  auto* to = reinterpret_cast<WholeBlock*>(numbers);
#pragma GCC unroll 3
  for (size_t d = 0; d < kDigits; ++d) write_digit(digit[d], to->digits[d]);
  to->unit = odd != 0 ? std::numeric_limits<float>::quiet_NaN() : greatest / kMostWhole;
}

// Where a row of x has the sums of its numbers over the groups.
CXL_OFFLOAD_VECTOR const float* sums_of_row(const LinearPanel& panel, size_t row) {
  return panel.x + row * panel.x_step + round_up(panel.width, kLinearPad);
}

// Writes the sums of a row over the groups behind it, and turns the row into whole numbers.
inline void prepare_row(float* row, size_t width, size_t group) {
  float* sums = row + round_up(width, kLinearPad);
  for (size_t at = 0; at < width; at += group) {
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = 0; i < group; i += 16) {
      sum = _mm512_add_ps(sum, _mm512_loadu_ps(row + at + i));
    }
    sums[at / group] = _mm512_reduce_add_ps(sum);
  }
  for (size_t at = 0; at < width; at += kBlock) make_whole(row + at);
}

void prepare_integers(const LinearInput& input) {
  linear_kernel_avx512(Dtype::kFloat32).prepare(input);
  if (input.width == 0) return;
  for (size_t row = 0; row < input.rows; ++row) {
    prepare_row(input.to + row * input.to_step, input.width, input.group);
  }
}

// Adds the products of four codes and four digits to each lane of `sum`. This is assembly because
// in loops over the intrinsic GCC 12 copies the sums.
CXL_OFFLOAD_VECTOR __m512i multiply_digits(__m512i sum, __m512i codes, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(digits));
  return sum;
}

// The sums of a strip of R outputs and a tile of M rows.
template <size_t M, size_t R>
struct Strip {
  CXL_OFFLOAD_VECTOR Strip(const LinearPanel& panel, const Room& room, const Step& step)
      : panel(panel),
        room(room),
        step(step),
        x(panel.x + step.row * panel.x_step),
        codes(panel.weight + step.output * panel.weight_step),
        apart(step.apart * panel.weight_step),
        steps_apart(step.apart * groups_of(panel)),
        steps(room.steps.data.get() + step.output * groups_of(panel)),
        places(_mm512_load_si512(room.scale_places)) {
#pragma GCC unroll 32
    for (size_t i = 0; i < M * R; ++i) sum[i / R][i % R] = Vector::all(0);
  }

  CXL_OFFLOAD_VECTOR void add_block(size_t at) {
    const std::byte* from = codes + at / 2;
    const float* scales = steps + room.first_groups.data[at / kBlock];
    const __m512i lowest = _mm512_set1_epi8(15);
    __m512i part[R][2];  // the upper and the lower codes of bytes
    __m512 scale[R];
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
      const __m512i bytes = _mm512_loadu_si512(from + r * apart);
      prefetch_second(from + r * apart + step.ahead);
      part[r][0] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), lowest);
      part[r][1] = _mm512_and_si512(bytes, lowest);
      scale[r] = _mm512_permutexvar_ps(
          places, _mm512_castps128_ps512(_mm_loadu_ps(scales + r * steps_apart)));
    }
#pragma GCC unroll 8
    for (size_t m = 0; m < M; ++m) {
      add_row(*reinterpret_cast<const WholeBlock*>(x + m * panel.x_step + at), part, scale, sum[m]);
    }
  }

  // Adds the products with one row of x. A lane has those of eight codes, which are below 2^31.
  CXL_OFFLOAD_VECTOR static void add_row(const WholeBlock& whole, const __m512i (&part)[R][2],
                                         const __m512 (&scale)[R], Vector (&to)[R]) {
    __m512i products[R];
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) products[r] = _mm512_setzero_si512();
#pragma GCC unroll 3
    for (size_t d = 0; d < kDigits; ++d) {
#pragma GCC unroll 8
      for (size_t r = 0; r < R; ++r) products[r] = _mm512_slli_epi32(products[r], 8);
#pragma GCC unroll 2
      for (size_t half = 0; half < 2; ++half) {
        const __m512i digits = _mm512_loadu_si512(whole.digits[d][half]);
#pragma GCC unroll 8
        for (size_t r = 0; r < R; ++r) {
          products[r] = multiply_digits(products[r], part[r][half], digits);
        }
      }
    }
    const __m512 unit = _mm512_set1_ps(whole.unit);
#pragma GCC unroll 8
    for (size_t r = 0; r < R; ++r) {
      to[r].value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[r]), _mm512_mul_ps(scale[r], unit),
                                    to[r].value);
    }
  }

  CXL_OFFLOAD_VECTOR void store() {
    add_lows(panel, room, step, sums_of_row(panel, step.row), panel.x_step, sum);
    write_totals(panel, step, sum);
  }

  const LinearPanel& panel;
  const Room& room;
  const Step& step;
  const float* x;          // rows of WholeBlock
  const std::byte* codes;  // those of the first output
  size_t apart;            // bytes from one output to the next
  size_t steps_apart;      // what `room` has for the first output, and from one to the next
  const float* steps;
  __m512i places;
  Vector sum[M][R];
};

template <size_t M, size_t R>
[[gnu::noinline]] void multiply_strip(const LinearPanel& panel, const Room& room,
                                      const Step& step) {
  Strip<M, R> strip(panel, room, step);
  for (size_t at = step.begin; at < step.end; at += kBlock) strip.add_block(at);
  strip.store();
}

template <size_t M>
void multiply_tiles(const LinearPanel& panel) {
  static_assert(!is_spread<M, kTogetherOutputs>(kBlock, sizeof(float)));
  Room& room = room_of_this_thread();
  read_scales(panel, room);
  const Order order(panel, kBlock, sizeof(float), 0, panel.width);
  visit_steps<M, kTogetherOutputs>(order, [&]<size_t kStrip>(const Step& step) {
    multiply_strip<M, kStrip>(panel, room, step);
  });
}

void multiply_integers(const LinearPanel& panel) {
  switch (panel.tile) {
    case 1:
      return multiply_tiles<1>(panel);
    case 2:
      return multiply_tiles<2>(panel);
    case 4:
      return multiply_tiles<4>(panel);
    case 6:
      return multiply_tiles<6>(panel);
    default:
      return multiply_tiles<8>(panel);
  }
}
