// Linear layers of few rows over weights that stay where they are: y = x w^T + bias.
//
// With few rows, reading the weights takes longest. Each weight is read once, in its own type, and
// becomes float in a register, where all rows are multiplied by it.
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

// One of several copies of the weights, for a group of a team to read. It has the strides of the
// first copy.
struct NearCopy {
  const std::byte* weight = nullptr;
  const std::byte* groups = nullptr;
};

// Which instructions multiply weights by x. If both are sums of one or two numbers of bfloat16
// exactly, a processor may multiply these. The products are exact too, but subnormal numbers of
// bfloat16 count as zero, and an infinity of float16 gives NaN.
enum class Bf16Products {
  kNone,
  kVectors,  // vectors of AVX512-BF16, for x of bfloat16
  // Vectors of the same numbers as float32, for weights of float8_e4m3fn and x of bfloat16; needs
  // VBMI. Subnormal numbers of x keep their values.
  kWidened,
  kTiles,  // tiles of AMX, for x of bfloat16 and float16; or vectors if there are no tiles
  // As kTiles; but vectors for 4-bit codes and weights of float16, because those are faster at one
  // row. Vectors are of bfloat16 only where that is faster (has_fast_bf16_products), and those of
  // kWidened else.
  kBest,
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
  // width / groups weights. Without data the factor is 1.
  TensorView scale;
  TensorView bias;  // (outputs), contiguous, of float32, bfloat16 or float16; may have no data
  TensorView y;     // (rows, outputs) of float32, bfloat16 or float16; a row is contiguous
  Bf16Products bf16_products = Bf16Products::kBest;
  // Whether 4-bit codes are multiplied by whole numbers of 24 bits that stand for x, where the
  // processor can (has_integer_codes) and rows and groups are whole registers of codes.
  bool integers = false;
  // One copy for each group of the team; their bytes are equal. If empty, all groups read the
  // weights above.
  std::vector<NearCopy> near;
};

// Whether the weights are 4-bit codes.
inline bool is_codes(const Linear& linear) { return linear.weight.dtype == Dtype::kUint8; }

// Whether this processor can multiply numbers of bfloat16 in that way. The first question about
// tiles asks the operating system for them, which may refuse.
bool has_bf16_products(Bf16Products products = Bf16Products::kVectors);

// Whether vectors of bfloat16 are multiplied at least as fast here as the same numbers as float32.
// The first call measures it, which takes some 200 us. An EPYC of Zen 4 multiplies them twice as
// fast, a Xeon of Emerald Rapids half as fast.
bool has_fast_bf16_products();

// Throws InvalidArgument before anything is read or written when the shapes or types do not fit.
// Products and sums are float32. With 4-bit codes an infinity of x may give NaN. A row of y depends
// on no other row of x, and not on the team. In a team of several groups each begins with the
// weights on its own node; `kernel` says which those are. With a null kernel the groups begin
// anywhere, and so they do if every group has its own copy.
void run_linear(const Linear& linear, WorkerTeam& team, Isa isa,
                const os::Kernel* kernel = nullptr);

// Measures how many products a second all threads of a team can add to sums in registers by the
// instructions that run_linear() takes for such a layer: the most that it can reach, however fast
// the memory is. 0: that is not known of these instructions. Only types and shapes are looked at.
double linear_products_per_s(const Linear& linear, WorkerTeam& team, Isa isa);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_LINEAR_H_
