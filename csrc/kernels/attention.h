// Decode attention: each sequence and head has one or a few queries, which attend to keys and
// values that stay where they are. Every attended row of K and V is read once, and nothing of their
// size is stored anywhere.
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
  // (batch, heads * queries, dim), contiguous. The queries of a head lie one after another. Below,
  // `heads` are those of one query.
  TensorView q;
  int64_t queries = 1;  // how many each sequence and head has, at its last positions
  // Whether a query attends to no position after its own: query i of n then sees the first
  // length - n + 1 + i positions. A single query is at the last position, so nothing is after it.
  bool causal = true;
  // (batch, kv_heads, seq, dim), or (blocks, kv_heads, block, dim) with a table. The last dimension
  // is contiguous; the others have any strides. Both are of one type, and heads is a multiple of
  // kv_heads.
  TensorView k;
  TensorView v;
  // For caches of 4-bit codes. Then k and v are uint8, two codes a byte, the first in the upper
  // half. Their last dimension is whole groups of 64, 128, ... codes; codes beyond dim are not
  // used. These are the scales of the groups: float16 (batch, kv_heads, seq, groups, 2), or by
  // blocks as k and v are, with the last two dimensions contiguous.
  TensorView k_groups;
  TensorView v_groups;
  GroupScales group_scales = GroupScales::kLowStep;
  // Factors by which the numbers of K and V are multiplied: one for all, or one for each of
  // kv_heads. Without any the factor is 1.
  std::vector<float> k_scales;
  std::vector<float> v_scales;
  std::vector<int64_t> lengths;  // one for each sequence; empty if all have seq positions
  BlockTable table;
  // (batch, mask_columns). 0: the position is not attended to. Null: all positions are.
  const uint8_t* mask = nullptr;
  int64_t mask_columns = 0;
  int64_t window = 0;  // how many positions a query sees, up to its own; 0: all of them
  double scale = 1;
  // A score, q * k * scale, becomes cap * tanh(score / cap); 0: it stays as it is.
  double soft_cap = 0;
  // Then this is added to the scores: float32 (batch, heads, queries, positions), with any strides.
  // A stride is 0 where all share a number. Without data nothing is added.
  TensorView bias;
  // One score for each head that takes part in the softmax but has no value; empty: none.
  std::vector<float> sinks;
  // Whether 4-bit codes are multiplied as integers, if the kernels of AVX-512 run and the processor
  // can do it (AVX512-VNNI).
  bool integers = true;
  // Whether queries and keys of bfloat16 are multiplied as they are, if the kernels of AVX-512 run
  // and the processor can do it (has_bf16_vectors). Subnormal numbers of either count as zero then.
  bool bf16_products = false;
  TensorView out;  // its shape is that of q
  // (batch, heads * queries): the logarithm of the sum of the exponentials of the scores. Null
  // where nobody wants it.
  float* log_sum_exp = nullptr;

  // Whether the queries of a head see different positions.
  bool limits_queries() const { return queries > 1 && causal; }
  // Whether the score of a row depends on its position.
  bool needs_positions() const { return bias.data != nullptr || limits_queries(); }
};

// Throws InvalidArgument before anything is read or written when the shapes do not fit. A query
// that attends to nothing, or only to scores of minus infinity, gives zeros and minus infinity. The
// result does not depend on the team. In a team of several groups each begins with the keys on its
// own node; `kernel` says which those are. With a null kernel the groups begin anywhere.
void run_attention(const Attention& attention, WorkerTeam& team, Isa isa,
                   const os::Kernel* kernel = nullptr);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_H_
