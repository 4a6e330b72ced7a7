// Linear layers with NEON.
#include "kernels/linear_pass.h"

#if CXL_OFFLOAD_NEON

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/neon.inc.h"
//
#include "kernels/linear_products.inc.h"
//
#include "kernels/linear_order.inc.h"
//
#include "kernels/linear_rows.inc.h"
//
#include "kernels/linear_weights.inc.h"
//
#include "kernels/linear_loop.inc.h"
//
#include "kernels/linear_codes_eights.inc.h"

}  // namespace

LinearKernel linear_kernel_neon(Dtype weight) { return find_kernel(weight); }

}  // namespace cxl_offload::kernels

#else

namespace cxl_offload::kernels {

LinearKernel linear_kernel_neon(Dtype) { return {}; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_NEON
