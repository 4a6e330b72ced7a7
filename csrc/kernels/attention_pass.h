// The inner loop of decode attention, built once for every instruction set.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_PASS_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_PASS_H_

#include <cstddef>

#include "core/tensor_view.h"

namespace cxl_offload {

// Positions whose scores are kept between K and V: the rows of both stream for a while, and the
// scores stay in a near cache.
inline constexpr size_t kAttentionBlock = 256;
// At most so many rows are asked for before they are needed. The prefetchers of the hardware stop
// at the end of a page, and rows of one head may be pages apart.
inline constexpr size_t kAttentionAhead = 32;

// Dimensions of q and of the sums are padded with zeros to a multiple of this many.
inline constexpr size_t kAttentionPad = 16;

// Rows of one sequence: head h of row i begins at k[i] + h * k_step bytes.
struct AttentionRows {
  const std::byte* k[kAttentionBlock + kAttentionAhead];
  const std::byte* v[kAttentionBlock + kAttentionAhead];
  size_t k_step = 0;
  size_t v_step = 0;
  size_t ahead = 0;  // how many rows to ask for early
  size_t count = 0;  // at most a block; kAttentionAhead more are valid addresses
};

// What is known of the queries of some heads after the rows so far.
struct AttentionState {
  size_t kv_heads = 0;
  size_t group = 0;  // queries of one head of K and V
  size_t dim = 0;
  size_t padded = 0;
  const float* q = nullptr;  // [kv_heads * group][padded], times the scale
  float* sums = nullptr;     // [kv_heads * group][padded]: of values times weights
  float* most = nullptr;     // [kv_heads * group]: the greatest score
  float* total = nullptr;    // [kv_heads * group]: of the weights, exp(score - most)
  float* scores = nullptr;   // [kv_heads * group][kAttentionBlock]
};

using AttentionPass = void (*)(const AttentionRows& rows, const AttentionState& state);

AttentionPass attention_pass_scalar(Dtype dtype);
AttentionPass attention_pass_avx2(Dtype dtype);
AttentionPass attention_pass_avx512(Dtype dtype);

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_PASS_H_
