// Norms in plain C++.
#include "kernels/norm_pass.h"
#include "kernels/vector/vector.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/scalar.inc.h"
//
#include "kernels/norm_loop.inc.h"

}  // namespace

NormPass norm_pass_scalar(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload::kernels
