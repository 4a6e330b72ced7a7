// What one element of an update becomes, written once over a type `Vector` or several of them.
// Included before the loops by one file for every instruction set, between its target pragmas and
// inside an unnamed namespace. Hence no include guard, and no includes.
//
// A product is only ever the addend of a fused multiply-add, a factor or a divisor, never the
// operand of a plain sum, so that compilers find nothing to contract and all builds agree bit by
// bit.

// Elements between what is computed and what is fetched from memory, in every stream. Measured: see
// docs/adam.md.
constexpr size_t kPrefetchElements = Vector::kLanes == 1 ? 0 : 1024;
constexpr size_t kLineBytes = 64;

template <class T>
CXL_OFFLOAD_VECTOR void fetch_ahead(const T* at) {
  const char* ahead = reinterpret_cast<const char*>(at + kPrefetchElements);
  for (size_t line = 0; line < kBlockElements * sizeof(T) / 64; ++line) {
    __builtin_prefetch(ahead + line * 64);
  }
}

template <class V>
CXL_OFFLOAD_VECTOR V scaled_gradient(V param, V grad, const Constants& c) {
  const V scaled = mul(grad, V::all(c.grad_scale));
  return c.l2 == 0 ? scaled : fma(V::all(c.l2), param, scaled);
}

struct AdamRule {
  static constexpr bool kTwoStates = true;

  template <class V>
  CXL_OFFLOAD_VECTOR static void apply(V& param, V grad, V& mean, V& square, const Constants& c) {
    const V g = scaled_gradient(param, grad, c);
    mean = fma(V::all(c.beta1), mean, mul(V::all(c.rest1), g));
    square = fma(V::all(c.beta2), square, mul(mul(V::all(c.rest2), g), g));
    const V divisor = fma(root(square), V::all(c.root_scale), V::all(c.eps));
    param = fma(V::all(c.minus_step), div(mean, divisor), mul(param, V::all(c.decay)));
  }
};

struct AdagradRule {
  static constexpr bool kTwoStates = false;

  template <class V>
  CXL_OFFLOAD_VECTOR static void apply(V& param, V grad, V& sum, V&, const Constants& c) {
    const V g = scaled_gradient(param, grad, c);
    sum = fma(g, g, sum);
    // A sum of one of the two and a root: nothing to contract.
    param = fma(V::all(c.minus_step), div(g, add(root(sum), V::all(c.eps))), param);
  }
};

struct LionRule {
  static constexpr bool kTwoStates = false;

  template <class V>
  CXL_OFFLOAD_VECTOR static void apply(V& param, V grad, V& mean, V&, const Constants& c) {
    const V g = scaled_gradient(param, grad, c);
    const V direction = sign(fma(V::all(c.beta1), mean, mul(V::all(c.rest1), g)));
    param = fma(V::all(c.minus_step), direction, mul(param, V::all(c.decay)));
    mean = fma(V::all(c.beta2), mean, mul(V::all(c.rest2), g));
  }
};
