// The norm of a row over the names of a vector/*.inc.h.

// Returns the sum of the squares of a row.
template <class T>
CXL_OFFLOAD_VECTOR float squares(const T* x, size_t width) {
  constexpr size_t kSums = 4;  // as many additions are under way at once
  Vector sums[kSums] = {Vector::all(0), Vector::all(0), Vector::all(0), Vector::all(0)};
  size_t at = 0;
  for (; at + kSums * Vector::kLanes <= width; at += kSums * Vector::kLanes) {
    for (size_t i = 0; i < kSums; ++i) {
      const Vector part = Vector::load(x + at + i * Vector::kLanes);
      sums[i] = mul_add(part, part, sums[i]);
    }
  }
  for (; at + Vector::kLanes <= width; at += Vector::kLanes) {
    const Vector part = Vector::load(x + at);
    sums[0] = mul_add(part, part, sums[0]);
  }
  const Vector rest = Vector::load_some(x + at, width - at);
  sums[1] = mul_add(rest, rest, sums[1]);
  return add(add(sums[0], sums[1]), add(sums[2], sums[3])).total();
}

// Writes weight * (x * factor) to `y`. What is in brackets is rounded to T: it goes through `y`.
template <class T>
CXL_OFFLOAD_VECTOR void put_scaled(Vector x, Vector weight, Vector factor, T* y) {
  Vector scaled = mul(x, factor);
  if constexpr (!std::is_same_v<T, float>) {
    scaled.store(y);
    scaled = Vector::load(y);
  }
  mul(weight, scaled).store(y);
}

template <class T>
void norm_rows(const NormRows& a) {
  const auto* weight = reinterpret_cast<const T*>(a.weight);
  const size_t whole = a.width / Vector::kLanes * Vector::kLanes;
  const size_t left = a.width - whole;
  for (size_t row = 0; row < a.rows; ++row) {
    const auto* x = reinterpret_cast<const T*>(a.x + static_cast<ptrdiff_t>(row) * a.x_step);
    auto* y = reinterpret_cast<T*>(a.y) + row * a.width;
    const float mean = squares(x, a.width) / static_cast<float>(a.width);
    const Vector factor = Vector::all(1 / std::sqrt(mean + a.eps));
    for (size_t at = 0; at < whole; at += Vector::kLanes) {
      put_scaled(Vector::load(x + at), Vector::load(weight + at), factor, y + at);
    }
    if (left == 0) continue;
    T last[Vector::kLanes];
    put_scaled(Vector::load_some(x + whole, left), Vector::load_some(weight + whole, left), factor,
               last);
    std::memcpy(y + whole, last, left * sizeof(T));
  }
}

NormPass find_pass(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return norm_rows<float>;
    case Dtype::kBfloat16:
      return norm_rows<Bf16>;
    default:
      return norm_rows<F16>;
  }
}
