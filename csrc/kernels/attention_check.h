// What must hold before attention reads its first byte.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_CHECK_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_CHECK_H_

#include "kernels/attention.h"

namespace cxl_offload::kernels {

// Throws InvalidArgument; see run_attention().
void check_attention(const Attention& attention);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_CHECK_H_
