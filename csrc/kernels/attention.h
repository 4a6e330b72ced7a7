// Decode attention: one or a few queries a sequence and head over keys and values that stay where
// they are. Every attended row of K and V is read once; nothing of their size is stored anywhere.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/cpu_features.h"
#include "core/tensor_view.h"
#include "kernels/group_scales.h"
#include "kernels/worker_team.h"
#include "os/kernel.h"

namespace cxl_offload::kernels {

// Which block of the cache holds positions [i * block, (i + 1) * block) of a sequence.
struct BlockTable {
  const int32_t* data = nullptr;  // null: the cache is not in blocks
  int64_t columns = 0;
  int64_t stride = 0;  // elements between the rows of two sequences
};

struct Attention {
  // (batch, heads * queries, dim), contiguous: the queries of a head one after another. Heads below
  // are those of one query.
  TensorView q;
  int64_t queries = 1;  // of a sequence and head, at its last positions
  // Whether a query attends to no position after its own: query i of n sees the first length - n +
  // 1 + i. With one query nothing is after it.
  bool causal = true;
  // (batch, kv_heads, seq, dim), or (blocks, kv_heads, block, dim) with a table. The last dimension
  // is contiguous; the others have any strides. Both of one type; heads is a multiple of kv_heads.
  TensorView k;
  TensorView v;
  // Caches of 4-bit codes: k and v are of uint8, two codes a byte, the first in the upper half;
  // their last dimension is whole groups of 64, 128, ... codes, of which those beyond dim are not
  // used. Here is what the codes are worth, float16 of (batch, kv_heads, seq, groups, 2), or by
  // blocks as k and v, the last two dimensions contiguous.
  TensorView k_groups;
  TensorView v_groups;
  GroupScales group_scales = GroupScales::kLowStep;
  // What their numbers are multiplied by: one factor, or one for each of kv_heads; none: 1.
  std::vector<float> k_scales;
  std::vector<float> v_scales;
  std::vector<int64_t> lengths;  // of the sequences; none: all of them seq
  BlockTable table;
  const uint8_t* mask = nullptr;  // (batch, mask_columns), 0: not attended; null: all are
  int64_t mask_columns = 0;
  int64_t window = 0;  // only so many positions, up to that of the query; 0: all
  double scale = 1;
  // What becomes of a score, q * k * scale: first cap * tanh(score / cap); 0: it is kept.
  float soft_cap = 0;
  // Then this is added: float32 (batch, heads, queries, positions), any strides, 0 where all share
  // a number; no data: nothing.
  TensorView bias;
  // A score of each head that takes its share of the weights and has no value; none: none.
  std::vector<float> sinks;
  // With AVX-512: 4-bit codes are multiplied as integers where the processor can (AVX512-VNNI).
  bool integers = true;
  TensorView out;  // like q
  // (batch, heads * queries): the logarithm of the sum of the exponentials of the scores; null: not
  // wanted.
  float* log_sum_exp = nullptr;
};

// Whether this processor can multiply codes as integers.
bool has_integer_codes();

// Throws InvalidArgument before anything is read or written when the shapes do not fit. A query
// that attends to nothing, or only to scores of minus infinity, gives zeros and minus infinity. The
// result does not depend on the team. In a team of several groups each begins with the keys on its
// node, which `kernel` is asked for; null: nobody is asked.
void run_attention(const Attention& attention, WorkerTeam& team, Isa isa,
                   const os::Kernel* kernel = nullptr);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_H_
