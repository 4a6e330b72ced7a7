// Decode attention with AVX-512 (F, BW, DQ and VL).
#include "kernels/attention_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_X86

#include "kernels/vector/target_avx512.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/avx512.inc.h"
//
#include "kernels/attention_loop.inc.h"
//
#include "kernels/attention_codes.inc.h"

}  // namespace

AttentionPass attention_pass_avx512(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"
//
#include "kernels/vector/target_avx512vnni.inc.h"

namespace cxl_offload::kernels {
namespace {

#include "kernels/attention_integers.inc.h"

}  // namespace

AttentionPass attention_pass_integers(size_t groups) {
  if (!has_integer_codes()) return nullptr;
  return groups == 1 ? attend_integers<1> : attend_integers<2>;
}

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

AttentionPass attention_pass_avx512(Dtype) { return nullptr; }
AttentionPass attention_pass_integers(size_t) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
