// Norms with NEON.
#include "kernels/norm_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_NEON

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/neon.inc.h"
//
#include "kernels/norm_loop.inc.h"

}  // namespace

NormPass norm_pass_neon(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload::kernels

#else

namespace cxl_offload::kernels {

NormPass norm_pass_neon(Dtype) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_NEON
