// The updates with AVX-512 (F, BW, DQ and VL).
#include "kernels/update_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_X86

#include "kernels/vector/target_avx512.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/avx512.inc.h"
//
#include "kernels/update_rules.inc.h"
//
#include "kernels/update_loop.inc.h"
//
#include "kernels/update_find.inc.h"

}  // namespace

UpdatePass update_pass_avx512(const PassKey& key) {
  const UpdatePass rounded_by_processor = update_pass_bf16_avx512(key);
  return rounded_by_processor != nullptr ? rounded_by_processor : find_pass(key);
}

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

UpdatePass update_pass_avx512(const PassKey&) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
