// The loops over rows of a norm, one for each instruction set and type.
#ifndef CXL_OFFLOAD_KERNELS_NORM_PASS_H_
#define CXL_OFFLOAD_KERNELS_NORM_PASS_H_

#include <cstddef>

#include "core/tensor_view.h"

namespace cxl_offload::kernels {

struct NormRows {
  const std::byte* x = nullptr;
  ptrdiff_t x_step = 0;  // the bytes from one row of x to the next
  const std::byte* weight = nullptr;
  std::byte* y = nullptr;
  size_t rows = 0;
  size_t width = 0;  // at least 1
  float eps = 0;
};

using NormPass = void (*)(const NormRows& rows);

// Where an instruction set is not compiled in, its pass is null.
NormPass norm_pass_scalar(Dtype dtype);
NormPass norm_pass_neon(Dtype dtype);
NormPass norm_pass_sve256(Dtype dtype);
NormPass norm_pass_avx2(Dtype dtype);
NormPass norm_pass_avx512(Dtype dtype);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_NORM_PASS_H_
