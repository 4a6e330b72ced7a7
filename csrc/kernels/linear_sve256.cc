// Linear layers with SVE, in vectors of 256 bits.
#include "kernels/linear_pass.h"

#if CXL_OFFLOAD_SVE256

#include "kernels/vector/target_sve256.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/sve256.inc.h"
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

LinearKernel linear_kernel_sve256(Dtype weight) { return find_kernel(weight); }

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

LinearKernel linear_kernel_sve256(Dtype) { return {}; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_SVE256
