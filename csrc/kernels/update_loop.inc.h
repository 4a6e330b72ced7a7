// The loop of the updates, written once over a type `Vector`. One file for every instruction set
// includes it, between its target pragmas and inside an unnamed namespace, so that two instruction
// sets share no function. Hence it has no include guard and no includes.

// Two vectors of neighbours in bfloat16. Few instructions take them apart and put them together
// again. When every stream is bfloat16, ordinary conversions would take longer than reading the
// memory.
struct EvenOdd {
  static constexpr size_t kLanes = 2 * Vector::kLanes;
  Vector even;
  Vector odd;

  CXL_OFFLOAD_VECTOR static EvenOdd all(float value) {
    return {Vector::all(value), Vector::all(value)};
  }
  CXL_OFFLOAD_VECTOR static EvenOdd load(const Bf16* at) {
    EvenOdd pair;
    Vector::load_pair(at, pair.even, pair.odd);
    return pair;
  }
  CXL_OFFLOAD_VECTOR void store(Bf16* at) const { Vector::store_pair(at, even, odd); }
  static void wait_for_stores() {}
};

CXL_OFFLOAD_VECTOR EvenOdd add(EvenOdd a, EvenOdd b) {
  return {add(a.even, b.even), add(a.odd, b.odd)};
}
CXL_OFFLOAD_VECTOR EvenOdd mul(EvenOdd a, EvenOdd b) {
  return {mul(a.even, b.even), mul(a.odd, b.odd)};
}
CXL_OFFLOAD_VECTOR EvenOdd div(EvenOdd a, EvenOdd b) {
  return {div(a.even, b.even), div(a.odd, b.odd)};
}
CXL_OFFLOAD_VECTOR EvenOdd fma(EvenOdd a, EvenOdd b, EvenOdd c) {
  return {fma(a.even, b.even, c.even), fma(a.odd, b.odd, c.odd)};
}
CXL_OFFLOAD_VECTOR EvenOdd root(EvenOdd a) { return {root(a.even), root(a.odd)}; }
CXL_OFFLOAD_VECTOR EvenOdd sign(EvenOdd a) { return {sign(a.even), sign(a.odd)}; }

template <class P, class G, class S>
using VectorFor = std::conditional_t<
    std::is_same_v<P, Bf16> && std::is_same_v<G, Bf16> && std::is_same_v<S, Bf16>, EvenOdd, Vector>;

template <class Rule, class P, class G, class S, class C>
struct Loop {
  using V = VectorFor<P, G, S>;
  static constexpr bool kCopies = !std::is_same_v<C, void>;
  using CopyElement = std::conditional_t<kCopies, C, Bf16>;

  CXL_OFFLOAD_VECTOR static void block(P* param, const G* grad, S* first, S* second,
                                       CopyElement* copy, bool past_caches, const Constants& c) {
    for (size_t i = 0; i < kBlockElements; i += V::kLanes) {
      V p = V::load(param + i);
      V a = V::load(first + i);
      V b = V::all(0);
      if constexpr (Rule::kTwoStates) b = V::load(second + i);
      Rule::apply(p, V::load(grad + i), a, b, c);
      p.store(param + i);
      a.store(first + i);
      if constexpr (Rule::kTwoStates) b.store(second + i);
      if constexpr (kCopies) {
        if (past_caches) {
          p.stream(copy + i);
        } else {
          p.store(copy + i);
        }
      }
    }
  }

  [[gnu::noinline]] static void rest(P* param, const G* grad, S* first, S* second,
                                     CopyElement* copy, size_t count, const Constants& c) {
    alignas(kLineBytes) P p[kBlockElements] = {};
    alignas(kLineBytes) G g[kBlockElements] = {};
    alignas(kLineBytes) S a[kBlockElements] = {};
    alignas(kLineBytes) S b[kBlockElements] = {};
    alignas(kLineBytes) CopyElement low[kBlockElements] = {};
    for (size_t i = 0; i < count; ++i) {
      p[i] = param[i];
      g[i] = grad[i];
      a[i] = first[i];
      if constexpr (Rule::kTwoStates) b[i] = second[i];
    }
    block(p, g, a, b, low, false, c);
    for (size_t i = 0; i < count; ++i) {
      param[i] = p[i];
      first[i] = a[i];
      if constexpr (Rule::kTwoStates) second[i] = b[i];
      if constexpr (kCopies) copy[i] = low[i];
    }
  }

  // Returns how many elements lie before the first whole line of the copy. Stores past the caches
  // write whole lines only. A range may begin anywhere in a line of the copy, because ranges are
  // cut at the pages of the parameters.
  static size_t before_line(const CopyElement* copy) {
    const auto address = reinterpret_cast<uintptr_t>(copy);
    return (kLineBytes - address % kLineBytes) % kLineBytes / sizeof(CopyElement);
  }

  static void pass(const Streams& streams, size_t begin, size_t end, const Constants& constants) {
    const Constants c = constants;  // a local copy, which stores through the streams cannot change
    P* param = reinterpret_cast<P*>(streams.param);
    const G* grad = reinterpret_cast<const G*>(streams.grad);
    S* first = reinterpret_cast<S*>(streams.first);
    S* second = Rule::kTwoStates ? reinterpret_cast<S*>(streams.second) : nullptr;
    CopyElement* copy = kCopies ? reinterpret_cast<CopyElement*>(streams.copy) : nullptr;
    const auto advance = [&](size_t count) __attribute__((always_inline)) {
      param += count;
      grad += count;
      first += count;
      if constexpr (Rule::kTwoStates) second += count;
      if constexpr (kCopies) copy += count;
    };
    advance(begin);
    const bool past_caches = kCopies && streams.copy_past_caches;
    size_t left = end - begin;
    if (past_caches) {
      const size_t before = before_line(copy);
      const size_t head = before < left ? before : left;
      if (head > 0) rest(param, grad, first, second, copy, head, c);
      advance(head);
      left -= head;
    }
    const size_t ahead = streams.ahead;
    for (; left >= kBlockElements; left -= kBlockElements) {
      if (ahead != 0) {
        fetch_ahead(param, ahead);
        fetch_ahead(grad, ahead);
        fetch_ahead(first, ahead);
        if constexpr (Rule::kTwoStates) fetch_ahead(second, ahead);
      }
      block(param, grad, first, second, copy, past_caches, c);
      advance(kBlockElements);
    }
    if (left > 0) rest(param, grad, first, second, copy, left, c);
    if (past_caches) V::wait_for_stores();
  }
};
