// Norms with AVX-512 (F, BW, DQ and VL).
#include "kernels/norm_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_X86

#include "kernels/vector/target_avx512.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/avx512.inc.h"
//
#include "kernels/norm_loop.inc.h"

}  // namespace

NormPass norm_pass_avx512(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

NormPass norm_pass_avx512(Dtype) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
