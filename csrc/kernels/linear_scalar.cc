// Linear layers in plain C++.
#include "kernels/linear_pass.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/scalar.inc.h"
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
#include "kernels/linear_codes_table.inc.h"

}  // namespace

LinearKernel linear_kernel_scalar(Dtype weight) { return find_kernel(weight); }

}  // namespace cxl_offload::kernels
