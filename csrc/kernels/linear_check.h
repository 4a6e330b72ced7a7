// What must hold before a linear layer reads its first byte.
#ifndef CXL_OFFLOAD_KERNELS_LINEAR_CHECK_H_
#define CXL_OFFLOAD_KERNELS_LINEAR_CHECK_H_

#include "kernels/linear.h"

namespace cxl_offload::kernels {

// Throws InvalidArgument; see run_linear().
void check_linear(const Linear& linear);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_LINEAR_CHECK_H_
