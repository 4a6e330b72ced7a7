// Rows on their way in and out: how rows of x become the numbers that the loops multiply, and how
// sums become numbers of y. The source of each instruction set includes this file inside of an
// unnamed namespace, after vector/*.inc.h.

constexpr size_t kPair = 2 * Vector::kLanes;

template <class T>
CXL_OFFLOAD_VECTOR void widen(const T* from, size_t width, float* to) {
  size_t at = 0;
  for (; at + Vector::kLanes <= width; at += Vector::kLanes) {
    Vector::load(from + at).store(to + at);
  }
  if (at < width) Vector::load_some(from + at, width - at).store(to + at);
}

// Puts the even numbers of each pair of vectors before the odd ones.
inline void take_apart(float* row, size_t padded) {
  for (size_t at = 0; at < padded; at += kPair) {
    float pair[kPair];
    std::memcpy(pair, row + at, sizeof(pair));
    for (size_t i = 0; i < Vector::kLanes; ++i) {
      row[at + i] = pair[2 * i];
      row[at + Vector::kLanes + i] = pair[2 * i + 1];
    }
  }
}

template <bool kPairs>
void prepare(const LinearInput& input) {
  const size_t width = input.width;
  for (size_t row = 0; row < input.rows; ++row) {
    const std::byte* from = input.x + static_cast<ptrdiff_t>(row) * input.x_step;
    float* to = input.to + row * input.to_step;
    if (input.dtype == Dtype::kBfloat16) {
      widen(reinterpret_cast<const Bf16*>(from), width, to);
    } else if (input.dtype == Dtype::kFloat16) {
      widen(reinterpret_cast<const F16*>(from), width, to);
    } else {
      widen(reinterpret_cast<const float*>(from), width, to);
    }
    if constexpr (kPairs) take_apart(to, round_up(width, kLinearPad));
  }
}

template <class T>
void finish_as(const LinearResult& result) {
  T* y = reinterpret_cast<T*>(result.y);
  for (size_t at = 0; at < result.count; at += Vector::kLanes) {
    const size_t count = std::min(result.count - at, Vector::kLanes);
    Vector sum = Vector::load_some(result.sums + at, count);
    const Vector bias =
        result.bias == nullptr ? Vector::all(0) : Vector::load_some(result.bias + at, count);
    const Vector factor =
        result.factors == nullptr ? Vector::all(1) : Vector::load_some(result.factors + at, count);
    sum = mul_add(sum, factor, bias);
    if (count == Vector::kLanes) {
      sum.store(y + at);
    } else {
      T some[Vector::kLanes];
      sum.store(some);
      std::memcpy(y + at, some, count * sizeof(T));
    }
  }
}

void finish(const LinearResult& result) {
  if (result.dtype == Dtype::kBfloat16) return finish_as<Bf16>(result);
  if (result.dtype == Dtype::kFloat16) return finish_as<F16>(result);
  finish_as<float>(result);
}
