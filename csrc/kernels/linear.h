// Linear layers of few rows over weights that stay where they are: y = x w^T + bias.
//
// With few rows, reading the weights takes longest. Each weight is read once, in its own type, and
// becomes float in a register, where it serves all rows.
#ifndef CXL_OFFLOAD_KERNELS_LINEAR_H_
#define CXL_OFFLOAD_KERNELS_LINEAR_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/cpu_features.h"
#include "core/tensor_view.h"
#include "kernels/vector/vector.h"
#include "kernels/worker_team.h"
#include "os/kernel.h"

namespace cxl_offload::kernels {

// Where a group of a team reads weights that lie in several copies, in the strides of the first.
struct NearCopy {
  const std::byte* weight = nullptr;
  const std::byte* groups = nullptr;
};

// With AVX-512 and x of bfloat16, weights can be multiplied as bfloat16 where they convert to it
// exactly and the processor can. Products are exact then too, but the instructions take subnormal
// numbers for zero.
enum class Bf16Products {
  kNone,
  kVectors,  // of AVX512-BF16
  kTiles,    // of AMX, else of AVX512-BF16
  kBest,     // tiles; for 4-bit codes vectors, which are faster at one row
};

struct Linear {
  TensorView x;  // (rows, width) of float32, bfloat16 or float16; a row is contiguous
  // (outputs, width) of float32, bfloat16, float16, float8_e4m3fn or int8; or of uint8
  // (outputs, width / 2): two 4-bit codes a byte, the first in the upper half. A row is contiguous,
  // and rows are any number of elements apart.
  TensorView weight;
  // The scales of codes: float16 (outputs, groups, 2), the last two dimensions contiguous. A group
  // has a multiple of 32 codes.
  TensorView groups;
  GroupScales group_scales = GroupScales::kLowStep;
  // The factors of other weights: float32 (outputs, groups) with any strides; a group has
  // width / groups weights. No data: 1.
  TensorView scale;
  TensorView bias;  // (outputs), contiguous, of float32, bfloat16 or float16; no data: none
  TensorView y;     // (rows, outputs) of float32, bfloat16 or float16; a row is contiguous
  Bf16Products bf16_products = Bf16Products::kBest;
  // One for each group of the team, equal byte by byte; none: all groups read what is above.
  std::vector<NearCopy> near;
};

// Whether the weights are 4-bit codes.
inline bool is_codes(const Linear& linear) { return linear.weight.dtype == Dtype::kUint8; }

// Whether this processor multiplies numbers of bfloat16, in that way. Asking for tiles asks the
// operating system for them, once in a process; it may refuse.
bool has_bf16_products(Bf16Products products = Bf16Products::kVectors);

// Throws InvalidArgument before anything is read or written when the shapes or types do not fit.
// Products and sums are float32. A row of y depends on no other row of x, and not on the team. In a
// team of several groups each begins with the weights on its own node, which `kernel` names. With a
// null kernel the groups begin anywhere, as with weights that every group has a copy of.
void run_linear(const Linear& linear, WorkerTeam& team, Isa isa,
                const os::Kernel* kernel = nullptr);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_LINEAR_H_
