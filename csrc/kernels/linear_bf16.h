// Linear layers by products of bfloat16, on processors that have AVX-512 and VBMI, and on those
// that have AVX512-BF16 or AMX beside them.
#ifndef CXL_OFFLOAD_KERNELS_LINEAR_BF16_H_
#define CXL_OFFLOAD_KERNELS_LINEAR_BF16_H_

#include "kernels/linear.h"
#include "kernels/linear_pass.h"

namespace cxl_offload::kernels {

// Returns the kernel for x of bfloat16 and weights that convert to bfloat16 exactly. The kernel has
// no functions where it does not apply. The choice depends on types and groups only, so a row has
// the same bits in any batch.
LinearKernel linear_kernel_bf16(const Linear& linear);

// Does the same by multiplying the numbers as float32, for weights of float8_e4m3fn: tables make
// numbers of bfloat16 of them faster than arithmetic makes float32.
LinearKernel linear_kernel_widened(const Linear& linear);

// Does the same with tiles of AMX, which multiply 16 rows at once, and for weights and x of float16
// too.
LinearKernel linear_kernel_tiles(const Linear& linear);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_LINEAR_BF16_H_
