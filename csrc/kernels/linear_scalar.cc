// Linear layers in plain C++.
#include "kernels/linear_pass.h"

namespace cxl_offload::kernels {
namespace {

// One after the other.
#include "kernels/vector/scalar.inc.h"
//
#include "kernels/linear_order.inc.h"
//
#include "kernels/linear_loop.inc.h"

}  // namespace

LinearKernel linear_kernel_scalar(Dtype weight) { return find_kernel(weight); }

}  // namespace cxl_offload::kernels
