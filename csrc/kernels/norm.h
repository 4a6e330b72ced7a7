// Root-mean-square norms of rows: y = weight * (x / sqrt(mean(x * x) + eps)).
//
// PyTorch computes such a norm in seven passes over temporaries of float32. Here a row is read
// twice, the second time from the cache, and written once.
#ifndef CXL_OFFLOAD_KERNELS_NORM_H_
#define CXL_OFFLOAD_KERNELS_NORM_H_

#include "core/cpu_features.h"
#include "core/tensor_view.h"
#include "kernels/worker_team.h"

namespace cxl_offload::kernels {

// All tensors are of one type: float32, bfloat16 or float16.
struct Norm {
  TensorView x;       // (rows, width); a row is contiguous
  TensorView weight;  // (width), contiguous
  TensorView y;       // (rows, width), contiguous; may have the memory of x, if that is contiguous
  float eps = 0;
};

// Throws InvalidArgument when shapes or types do not fit.
void check_norm(const Norm& norm);

// Checks as check_norm() does before anything is read or written. Sums are float32. What weight is
// multiplied by is rounded to the type first, as a temporary of that type would be, and so is the
// product. A row of y depends on no other row of x, and not on the team.
void run_norm(const Norm& norm, WorkerTeam& team, Isa isa);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_NORM_H_
