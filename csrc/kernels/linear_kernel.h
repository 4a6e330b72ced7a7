// Which loops multiply a linear layer.
#ifndef CXL_OFFLOAD_KERNELS_LINEAR_KERNEL_H_
#define CXL_OFFLOAD_KERNELS_LINEAR_KERNEL_H_

#include "kernels/linear.h"
#include "kernels/linear_pass.h"

namespace cxl_offload::kernels {

// Returns the loops of an instruction set that multiply x as float32 by weights of a type.
LinearKernel linear_kernel(Dtype weight, Isa isa);

// Returns the loops for a layer: those it asks for, or the fastest of the instruction set.
LinearKernel linear_kernel(const Linear& linear, Isa isa);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_LINEAR_KERNEL_H_
