// The loop of updates that round at random: their states, or their parameters of bfloat16. It is
// included after update_rules.inc.h and update_states.inc.h.

constexpr size_t kLinesOf(size_t element_bytes) {
  return kCodedElements * element_bytes / kLineBytes;
}

template <class T>
CXL_OFFLOAD_VECTOR void fetch_block_ahead(const T* at, size_t ahead) {
  const char* first = reinterpret_cast<const char*>(at + ahead);
  for (size_t line = 0; line < kLinesOf(sizeof(T)); ++line)
    prefetch_near(first + line * kLineBytes);
}

// Adam with states that are codes. `kept_root` is the root of the second moment. When apply() gets
// the states, `mean` is already multiplied by beta1, and `kept_root` by the root of beta2. Without
// L2 the scale of gradients is part of the constants.
struct CodedAdamRule {
  static constexpr bool kTwoStates = true;

  explicit CodedAdamRule(const Constants& c)
      : c(c),
        first_factor(c.beta1),
        second_factor(std::sqrt(c.beta2)),
        of_mean(c.l2 == 0 ? c.rest1 * c.grad_scale : c.rest1),
        of_root(c.l2 == 0 ? std::sqrt(c.rest2) * c.grad_scale : std::sqrt(c.rest2)) {}

  CXL_OFFLOAD_VECTOR void apply(Vector& param, Vector grad, Vector& mean, Vector& kept_root) const {
    const Vector g = c.l2 == 0 ? grad : scaled_gradient(param, grad, c);
    const Vector part = mul(Vector::all(of_root), g);
    mean = fma(Vector::all(of_mean), g, mean);
    kept_root = root(fma(kept_root, kept_root, mul(part, part)));
    const Vector divisor = fma(kept_root, Vector::all(c.root_scale), Vector::all(c.eps));
    param = fma(Vector::all(c.minus_step), div(mean, divisor), mul(param, Vector::all(c.decay)));
  }

  const Constants c;
  const float first_factor;
  const float second_factor;
  const float of_mean;
  const float of_root;
};

template <class Rule>
struct PlainRule {
  static constexpr bool kTwoStates = Rule::kTwoStates;
  static constexpr float first_factor = 1;
  static constexpr float second_factor = 1;

  explicit PlainRule(const Constants& c) : c(c) {}
  CXL_OFFLOAD_VECTOR void apply(Vector& param, Vector grad, Vector& first, Vector& second) const {
    Rule::apply(param, grad, first, second, c);
  }

  const Constants c;
};

// A rule, and how its states are kept.
template <class S>
struct AdamStates {
  using Rule = PlainRule<AdamRule>;
  using First = NoisyState<S, true>;
  using Second = NoisyState<S, false>;
};
template <>
struct AdamStates<uint8_t> {
  using Rule = CodedAdamRule;
  using First = CodedState<SignedCode>;
  using Second = CodedState<RootCode>;
};
template <class S>
struct LionStates {
  using Rule = PlainRule<LionRule>;
  using First = NoisyState<S, true>;
  using Second = First;
};
template <>
struct LionStates<uint8_t> {
  using Rule = PlainRule<LionRule>;
  using First = CodedState<SignedCode>;
  using Second = First;
};

template <class States, class P, class G, class C>
struct NoisyLoop {
  using Rule = typename States::Rule;
  using First = typename States::First;
  using Second = typename States::Second;
  using S = typename First::Element;
  static constexpr bool kCoded = std::is_same_v<S, uint8_t>;
  static constexpr bool kTwo = Rule::kTwoStates;
  static constexpr bool kCopies = !std::is_same_v<C, void>;
  using CopyElement = std::conditional_t<kCopies, C, Bf16>;
  static constexpr bool kNoisyParam = std::is_same_v<P, Bf16>;

  // Where a block is in every stream.
  struct Block {
    P* param;
    const G* grad;
    S* first;
    S* second;
    CopyElement* copy;
    uint8_t* first_scale;
    uint8_t* second_scale;
  };

  // The new values of a block, before they are rounded.
  struct Room {
    alignas(kLineBytes) float first[kCodedElements];
    alignas(kLineBytes) float second[kTwo ? kCodedElements : 1];
    alignas(kLineBytes) float param[kNoisyParam ? kCodedElements : 1];
  };

  // A block that has been read and not yet written.
  struct Open {
    CXL_OFFLOAD_VECTOR Open() {}
    CXL_OFFLOAD_VECTOR void begin(const Block& block, Noise random, const Rule& rule, Room& room) {
      at = block;
      noise = random;
      kept_param = room.param;
      first.begin(at.first, at.first_scale, rule.first_factor, room.first);
      if constexpr (kTwo) second.begin(at.second, at.second_scale, rule.second_factor, room.second);
    }
    CXL_OFFLOAD_VECTOR void compute(size_t i, bool past_caches, const Rule& rule) {
      Vector p = Vector::load(at.param + i);
      Vector a = first.read(i);
      Vector b = Vector::all(0);
      if constexpr (kTwo) b = second.read(i);
      rule.apply(p, Vector::load(at.grad + i), a, b);
      first.keep(i, a);
      if constexpr (kTwo) second.keep(i, b);
      if constexpr (kNoisyParam) {
        p.store(kept_param + i);
      } else {
        p.store(at.param + i);
      }
      if constexpr (kCopies) {
        if (past_caches) {
          p.stream(at.copy + i);
        } else {
          p.store(at.copy + i);
        }
      }
    }
    CXL_OFFLOAD_VECTOR void end_reading() {
      first.end_reading();
      if constexpr (kTwo) second.end_reading();
    }
    CXL_OFFLOAD_VECTOR void write(size_t i) {
      const Words random = noise.next();
      first.write(i, random);
      if constexpr (kTwo) second.write(i, random);
      if constexpr (kNoisyParam) {
        store_noisy(Vector::load(kept_param + i), both(down<8>(random), Words::all(0xffff)),
                    at.param + i);
      }
    }
    CXL_OFFLOAD_VECTOR void end_writing() const {
      first.end_writing();
      if constexpr (kTwo) second.end_writing();
    }

    Block at = {};
    Noise noise;
    First first;
    Second second;  // used by rules that have a second state
    float* kept_param = nullptr;
  };

  CXL_OFFLOAD_VECTOR static void compute(Open& open, bool past_caches, const Rule& rule) {
    for (size_t i = 0; i < kCodedElements; i += Vector::kLanes) open.compute(i, past_caches, rule);
    open.end_reading();
  }
  CXL_OFFLOAD_VECTOR static void write(Open& open) {
    for (size_t i = 0; i < kCodedElements; i += Vector::kLanes) open.write(i);
    open.end_writing();
  }
  // Writes one block while the divider works on the next one. Roots and divisions wait for the
  // divider.
  CXL_OFFLOAD_VECTOR static void compute_and_write(Open& next, Open& open, bool past_caches,
                                                   const Rule& rule) {
    for (size_t i = 0; i < kCodedElements; i += Vector::kLanes) {
      next.compute(i, past_caches, rule);
      open.write(i);
    }
    open.end_writing();
    next.end_reading();
  }

  [[gnu::noinline]] static void rest(const Block& at, size_t count, const Noise& noise,
                                     const Rule& rule) {
    alignas(kLineBytes) P p[kCodedElements] = {};
    alignas(kLineBytes) G g[kCodedElements] = {};
    alignas(kLineBytes) S a[kCodedElements] = {};
    alignas(kLineBytes) S b[kCodedElements] = {};
    alignas(kLineBytes) CopyElement low[kCodedElements] = {};
    std::memcpy(p, at.param, count * sizeof(P));
    std::memcpy(g, at.grad, count * sizeof(G));
    std::memcpy(a, at.first, count * sizeof(S));
    if constexpr (kTwo) std::memcpy(b, at.second, count * sizeof(S));
    Room room;
    Open open;
    open.begin({p, g, a, b, low, at.first_scale, at.second_scale}, noise, rule, room);
    compute(open, false, rule);
    write(open);
    std::memcpy(at.param, p, count * sizeof(P));
    std::memcpy(at.first, a, count * sizeof(S));
    if constexpr (kTwo) std::memcpy(at.second, b, count * sizeof(S));
    if constexpr (kCopies) std::memcpy(at.copy, low, count * sizeof(CopyElement));
  }

  static Block block_of(const Streams& streams, size_t block) {
    const size_t at = block * kCodedElements;
    return {reinterpret_cast<P*>(streams.param) + at,
            reinterpret_cast<const G*>(streams.grad) + at,
            reinterpret_cast<S*>(streams.first) + at,
            kTwo ? reinterpret_cast<S*>(streams.second) + at : nullptr,
            kCopies ? reinterpret_cast<CopyElement*>(streams.copy) + at : nullptr,
            kCoded ? streams.first_scales + block : nullptr,
            kCoded && kTwo ? streams.second_scales + block : nullptr};
  }

  // `begin` is where a block begins.
  static void pass(const Streams& streams, size_t begin, size_t end, const Constants& constants) {
    const Rule rule(constants);
    // Ranges begin at whole blocks, so checking the address of the copy once is enough.
    const bool past_caches = kCopies && streams.copy_past_caches &&
                             reinterpret_cast<uintptr_t>(streams.copy) % kLineBytes == 0;
    size_t block = begin / kCodedElements;
    const size_t whole = end / kCodedElements, ahead = streams.ahead;
    Room rooms[2];
    Open open;
    for (bool opened = false; block < whole; ++block, opened = true) {
      Open next;
      next.begin(block_of(streams, block), Noise(streams.noise_seed, block), rule,
                 rooms[block % 2]);
      if (ahead != 0) {
        fetch_block_ahead(next.at.param, ahead);
        fetch_block_ahead(next.at.grad, ahead);
        fetch_block_ahead(next.at.first, ahead);
        if constexpr (kTwo) fetch_block_ahead(next.at.second, ahead);
      }
      if (opened) {
        compute_and_write(next, open, past_caches, rule);
      } else {
        compute(next, past_caches, rule);
      }
      open = next;
    }
    if (begin < whole * kCodedElements) write(open);
    const size_t left = end - whole * kCodedElements;
    if (left > 0) rest(block_of(streams, whole), left, Noise(streams.noise_seed, whole), rule);
    if (past_caches) Vector::wait_for_stores();
  }
};

template <class States, class P, class G>
UpdatePass noisy_pass_with_copy(CopyKind copy) {
  if constexpr (std::is_same_v<P, float>) {
    if (copy == CopyKind::kBf16) return &NoisyLoop<States, P, G, Bf16>::pass;
    if (copy == CopyKind::kF16) return &NoisyLoop<States, P, G, F16>::pass;
  }
  return copy == CopyKind::kNone ? &NoisyLoop<States, P, G, void>::pass : nullptr;
}

template <class States, class P>
UpdatePass noisy_pass_with_grad(const PassKey& key) {
  if (key.grad == Dtype::kFloat32) return noisy_pass_with_copy<States, P, float>(key.copy);
  if (key.grad == Dtype::kBfloat16) return noisy_pass_with_copy<States, P, Bf16>(key.copy);
  if (key.grad == Dtype::kFloat16) return noisy_pass_with_copy<States, P, F16>(key.copy);
  return nullptr;
}

template <template <class> class States>
UpdatePass noisy_pass_of(const PassKey& key) {
  if (key.param == Dtype::kBfloat16) {
    if (key.state == Dtype::kFloat32) return noisy_pass_with_grad<States<float>, Bf16>(key);
    if (key.state == Dtype::kBfloat16) return noisy_pass_with_grad<States<Bf16>, Bf16>(key);
    return noisy_pass_with_grad<States<uint8_t>, Bf16>(key);
  }
  if (key.param == Dtype::kFloat32) {
    if (key.state == Dtype::kBfloat16) return noisy_pass_with_grad<States<Bf16>, float>(key);
    if (key.state == Dtype::kUint8) return noisy_pass_with_grad<States<uint8_t>, float>(key);
  }
  return nullptr;
}

UpdatePass find_noisy_pass(const PassKey& key) {
  if (key.rule == RuleKind::kAdam) return noisy_pass_of<AdamStates>(key);
  if (key.rule == RuleKind::kLion) return noisy_pass_of<LionStates>(key);
  return nullptr;
}
