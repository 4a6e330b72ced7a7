// Layers of 4-bit codes by products of integers, on processors that have AVX512-VNNI.
#ifndef CXL_OFFLOAD_KERNELS_LINEAR_INTEGERS_H_
#define CXL_OFFLOAD_KERNELS_LINEAR_INTEGERS_H_

#include "kernels/linear.h"
#include "kernels/linear_pass.h"

namespace cxl_offload::kernels {

// Returns the kernel for 4-bit codes. It has no functions where it does not apply: on other
// processors, and for rows or groups that are no whole registers of codes. The choice depends on
// types and groups only, so a row has the same bits in any batch.
LinearKernel linear_kernel_integers(const Linear& linear);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_LINEAR_INTEGERS_H_
