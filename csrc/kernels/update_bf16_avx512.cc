// The updates whose streams are all bfloat16, with AVX512-BF16: rounding takes most instructions of
// those.
#include "kernels/update_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_X86

#include "kernels/vector/target_avx512bf16.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/avx512.inc.h"
//
#include "kernels/update_rules.inc.h"
//
#include "kernels/update_loop.inc.h"

template <class Rule>
constexpr UpdatePass pass_of = &Loop<Rule, Bf16, Bf16, Bf16, void>::pass;

}  // namespace

UpdatePass update_pass_bf16_avx512(const PassKey& key) {
  const bool is_all_bf16 = key.param == Dtype::kBfloat16 && key.grad == Dtype::kBfloat16 &&
                           key.state == Dtype::kBfloat16 && key.copy == CopyKind::kNone;
  if (!is_all_bf16 || !has_bf16_vectors()) return nullptr;
  switch (key.rule) {
    case RuleKind::kAdam:
      return pass_of<AdamRule>;
    case RuleKind::kAdagrad:
      return pass_of<AdagradRule>;
    case RuleKind::kLion:
      return pass_of<LionRule>;
  }
  return nullptr;
}

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

UpdatePass update_pass_bf16_avx512(const PassKey&) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
