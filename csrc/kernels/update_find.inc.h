// Finds the pass of a key among all of an instruction set. It is included after update_loop.inc.h.

template <class Rule, class P, class G, class S>
UpdatePass pass_with_copy(CopyKind copy) {
  if constexpr (std::is_same_v<P, float>) {
    if (copy == CopyKind::kBf16) return &Loop<Rule, P, G, S, Bf16>::pass;
    if (copy == CopyKind::kF16) return &Loop<Rule, P, G, S, F16>::pass;
  }
  return copy == CopyKind::kNone ? &Loop<Rule, P, G, S, void>::pass : nullptr;
}

template <class Rule, class P, class G>
UpdatePass pass_with_state(const PassKey& key) {
  if (key.state == Dtype::kFloat32) return pass_with_copy<Rule, P, G, float>(key.copy);
  if (key.state == Dtype::kBfloat16) return pass_with_copy<Rule, P, G, Bf16>(key.copy);
  return nullptr;
}

template <class Rule, class P>
UpdatePass pass_with_grad(const PassKey& key) {
  switch (key.grad) {
    case Dtype::kFloat32:
      return pass_with_state<Rule, P, float>(key);
    case Dtype::kBfloat16:
      return pass_with_state<Rule, P, Bf16>(key);
    case Dtype::kFloat16:
      return pass_with_state<Rule, P, F16>(key);
    case Dtype::kFloat8E4m3:
    case Dtype::kFloat8E5m2:
    case Dtype::kInt8:
    case Dtype::kUint8:
      break;
  }
  return nullptr;
}

template <class Rule>
UpdatePass pass_with_param(const PassKey& key) {
  switch (key.param) {
    case Dtype::kFloat32:
      return pass_with_grad<Rule, float>(key);
    case Dtype::kBfloat16:
      return pass_with_grad<Rule, Bf16>(key);
    case Dtype::kFloat16:
      return pass_with_grad<Rule, F16>(key);
    case Dtype::kFloat8E4m3:
    case Dtype::kFloat8E5m2:
    case Dtype::kInt8:
    case Dtype::kUint8:
      break;
  }
  return nullptr;
}

UpdatePass find_pass(const PassKey& key) {
  switch (key.rule) {
    case RuleKind::kAdam:
      return pass_with_param<AdamRule>(key);
    case RuleKind::kAdagrad:
      return pass_with_param<AdagradRule>(key);
    case RuleKind::kLion:
      return pass_with_param<LionRule>(key);
  }
  return nullptr;
}
