// How linear layers read weights of each type as vectors of float. The source of each instruction
// set includes this file inside of an unnamed namespace, before linear_loop.inc.h.

struct Codes {};  // two 4-bit codes a byte

// Whether weights of a type become float as a vector of the even elements and a vector of the odd
// ones, which is cheaper than keeping neighbours together. Numbers of x are then in the same order.
template <class W>
constexpr bool kPaired = std::is_same_v<W, Bf16> || std::is_same_v<W, Codes>;

template <class W>
constexpr size_t bytes_of(size_t weights) {
  if constexpr (std::is_same_v<W, Codes>) {
    return weights / 2;
  } else {
    return weights * sizeof(W);
  }
}

template <class W>
constexpr size_t kLineWeights = 2 * kLineBytes / bytes_of<W>(2);

// The weights of R outputs as float. With kScaled they are multiplied by the scales of one group.
template <class W, size_t R, bool kScaled>
struct Weights {
  CXL_OFFLOAD_VECTOR Weights(const LinearPanel& panel, const Step& step, size_t group) {
    if constexpr (kScaled) {
      const float* from =
          panel.scale + step.output * panel.scale_step + group * panel.scale_group_step;
#pragma GCC unroll 8
      for (size_t r = 0; r < R; ++r) factor[r] = from[r * step.apart * panel.scale_step];
    }
  }
  // Returns the first or the second vector of the pair that begins at weight `at`.
  template <size_t kHalf>
  CXL_OFFLOAD_VECTOR Vector half(size_t r, const std::byte* row, size_t at) const {
    const W* from = reinterpret_cast<const W*>(row) + at;
    if constexpr (kPaired<W>) {
      Vector pair[2];
      Vector::load_pair(from, pair[0], pair[1]);
      return pair[kHalf];
    } else {
      return scaled(r, Vector::load(from + kHalf * Vector::kLanes));
    }
  }
  template <class V>
  CXL_OFFLOAD_VECTOR void two(size_t r, const std::byte* row, size_t at, V& first,
                              V& second) const {
    V::load_two(reinterpret_cast<const W*>(row) + at, first, second);
    first = scaled(r, first);
    second = scaled(r, second);
  }
  CXL_OFFLOAD_VECTOR Vector some(size_t r, const std::byte* row, size_t at, size_t count) const {
    return scaled(r, Vector::load_some(reinterpret_cast<const W*>(row) + at, count));
  }
  CXL_OFFLOAD_VECTOR Vector scaled(size_t r, Vector number) const {
    if constexpr (kScaled) return mul(number, Vector::all(factor[r]));
    return number;
  }

  float factor[kScaled ? R : 1];
};
