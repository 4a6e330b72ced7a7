// What one element of an update becomes, written once over a type `Vector` or several of them. One
// file for every instruction set includes it before the loops, between its target pragmas and
// inside an unnamed namespace. Hence it has no include guard and no includes.
//
// No product is the operand of a plain sum. A compiler could contract the two into one instruction,
// and builds would differ in the last bit. Products are factors, divisors, or addends of an
// explicit fused multiply-add.

// Fetches as many elements as a turn of the loop has, `ahead` elements beyond the address.
template <class T>
CXL_OFFLOAD_VECTOR void fetch_ahead(const T* at, size_t ahead) {
  const char* first = reinterpret_cast<const char*>(at + ahead);
  for (size_t line = 0; line < kBlockElements * sizeof(T) / kLineBytes; ++line) {
    prefetch_near(first + line * kLineBytes);
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
    // This sum adds a root and a constant, so there is no product to contract.
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
