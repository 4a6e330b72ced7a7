// The inner loop of decode attention, built once for every instruction set.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_PASS_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_PASS_H_

#include <cstddef>
#include <cstdint>

#include "core/half.h"
#include "core/prefetch.h"
#include "core/rounding.h"
#include "core/sizes.h"
#include "core/tensor_view.h"

namespace cxl_offload::kernels {

// The most positions of a block: K is read for all of them, then V. Blocks are long enough that the
// rows of each stream from memory, and short enough that the scores between them stay in a near
// cache. Those of codes have fewer, since the integers that weights become share a scale.
inline constexpr size_t kAttentionBlock = 512;
inline constexpr size_t kAttentionCodesBlock = 256;
// The most rows that are prefetched before they are needed. The hardware's own prefetchers stop at
// the end of a page, and the rows of one head may be pages apart.
inline constexpr size_t kAttentionAhead = 64;

// Queries and sums are padded with zeros to a multiple of so many numbers.
inline constexpr size_t kAttentionPad = 16;

// The scales of this many rows of codes become float together.
inline constexpr size_t kAttentionScaleRows = 16;

// The codes of a group for which the fastest loops are written. FlexGen's caches have such groups.
inline constexpr size_t kGroupCodes = 64;

// Codes lie in a row two a byte, the first in the upper half. An instruction set of `lanes` lanes
// reads `lanes` words of two bytes at a time and takes the four codes of each word apart. Queries
// and sums are kept in the order that this gives. Returns the place of code `index` of a row in
// that order.
constexpr size_t code_place(size_t index, size_t lanes) {
  const size_t unit = index / (4 * lanes) * (4 * lanes);
  const size_t in_unit = index % (4 * lanes);
  return unit + in_unit % 4 * lanes + in_unit / 4;
}

// Where rows of bfloat16 become float, an instruction set of `lanes` lanes reads twice as many
// numbers at a time and takes the even ones and the odd ones apart. Queries and sums are kept in
// that order, up to the last whole pair of vectors in `dim` numbers. Returns the place of number
// `index`.
constexpr size_t pair_place(size_t index, size_t lanes, size_t dim) {
  const size_t pair = index / (2 * lanes) * (2 * lanes);
  if (pair + 2 * lanes > dim) return index;
  return pair + index % 2 * lanes + index % (2 * lanes) / 2;
}

// The place of the sum of code `index` when rows of one or two groups of 64 are multiplied as
// integers. Four bytes of codes make eight sums: first those of the upper codes, then those of the
// lower ones. The sums of the same four bytes of every 16 lie beside each other.
constexpr size_t integer_place(size_t index, size_t groups) {
  const size_t byte = index / 2;
  return (byte % 16 / 4 * 2 + index % 2) * 8 * groups + byte / 16 * 4 + byte % 4;
}

// Whether rows of so many groups can be multiplied as integers.
constexpr bool fits_integers(size_t groups, size_t group_codes) {
  return group_codes == kGroupCodes && (groups == 1 || groups == 2);
}

// A unit of several heads of K and V has at most so many queries.
inline constexpr size_t kTileQueries = 32;

// Rows that are copied to a near cache together, where a unit has many heads.
inline constexpr size_t kStagedRows = 16;

struct alignas(kLineBytes) StagedLine {
  std::byte bytes[kLineBytes];
};

// A query as whole numbers, for products with codes. Each number of q is `unit` times a whole
// number, which has three signed digits (attention_integers.inc.h says what each stands for). A
// vector of codes has two halves, and so have the digits. With two groups each half has the digits
// of one group. With one group both halves have the same digits.
struct WholeQuery {
  // [upper codes of bytes, lower ones][digit][code of the vector]
  alignas(kLineBytes) int8_t digits[2][3][kGroupCodes];
  // Each has a number for every lane of scales. Four lanes belong to the first group, the next four
  // to the second group, and so on.
  alignas(kLineBytes) float unit[16];
  alignas(kLineBytes) float sum[16];  // the sum of the numbers of q
  // 8 times the sum of the whole numbers, as the bits of an int32.
  alignas(kLineBytes) float middle[16];
  bool fits;  // false if a number is NaN, infinite or out of range
};

// Rows of one sequence: head h of row i begins at k[i] + h * k_step bytes.
struct AttentionRows {
  const std::byte* k[kAttentionBlock + kAttentionAhead];
  const std::byte* v[kAttentionBlock + kAttentionAhead];
  size_t k_step = 0;
  size_t v_step = 0;
  // Where k and v are codes, the scales of their groups lie in the same way.
  const std::byte* k_groups[kAttentionBlock + kAttentionAhead];
  const std::byte* v_groups[kAttentionBlock + kAttentionAhead];
  size_t k_groups_step = 0;
  size_t v_groups_step = 0;
  // The position of each row in its sequence, written where Attention::needs_positions().
  int32_t positions[kAttentionBlock + kAttentionAhead];
  // Whether k (or v) are codes, and those of the first head lie directly one row after another.
  bool k_in_line = false;
  bool v_in_line = false;
  size_t ahead = 0;                       // how many rows ahead of its use a row is prefetched
  Prefetch prefetch = Prefetch::kSecond;  // of rows of numbers
  size_t count = 0;  // at most a block; kAttentionAhead more are valid addresses
};

// How scores change before they become weights; see Attention.
struct ScoreRules {
  float soft_cap = 0;  // 0: none
  // The numbers that are added to the scores. It points at those of the unit's sequence and first
  // head: the number for head h, query i and position p is
  // bias[h * head_step + i * query_step + p * step]. Null where nothing is added.
  const float* bias = nullptr;
  int64_t head_step = 0;
  int64_t query_step = 0;
  int64_t step = 0;
  size_t queries = 1;  // how many each head has, one after another
  // If `limited`, query i sees positions [begin + i, end + i), and others have no weight.
  bool limited = false;
  int64_t begin = 0;
  int64_t end = 0;
};

// The state of the queries of some heads after the rows so far.
struct AttentionState {
  size_t kv_heads = 0;
  size_t group = 0;  // queries that share one head of K and V
  size_t dim = 0;
  size_t padded = 0;
  // [kv_heads * group][padded], times the scale. Or, with factors, each query is `padded` numbers
  // of bfloat16, in the order of a row, times the power of two of the scale.
  const float* q = nullptr;
  const float* factors = nullptr;     // [kv_heads * group]: what scores are multiplied by, or null
  const ScoreRules* rules = nullptr;  // null: scores are weights as they are
  float* sums = nullptr;              // [kv_heads * group][padded]: of values times weights
  float* most = nullptr;              // [kv_heads * group]: the greatest score
  float* total = nullptr;             // [kv_heads * group]: of the weights, exp(score - most)
  float* scores = nullptr;            // [kv_heads * group][kAttentionBlock]
  // For codes: a row of a head has `groups` groups of `group_codes` codes, `padded` together.
  size_t groups = 0;
  size_t group_codes = 0;
  bool inverse = false;  // whether (1 / step, low) is kept rather than (low, step)
  // A thread's scratch for the scales of some rows: [kAttentionScaleRows][kv_heads][groups][2] and
  // up to a vector more. `halves` has them as they are kept, `scales` as (step, low).
  F16* halves = nullptr;
  float* scales = nullptr;
  // A thread's scratch for queries of codes, [kv_heads * group][padded + groups * kAttentionPad] at
  // most; attention_code_sums.inc.h says what it writes there.
  float* divided = nullptr;
  // For products of integers: the queries as whole numbers. A thread makes them when it comes to
  // the first rows of a unit.
  WholeQuery* whole = nullptr;
  // For products of integers: a thread's copy of kStagedRows rows of many heads.
  std::byte* staged = nullptr;
  bool first = false;  // whether these are the first rows of the unit
};

using AttentionPass = void (*)(const AttentionRows& rows, const AttentionState& state);

AttentionPass attention_pass_scalar(Dtype dtype);
AttentionPass attention_pass_neon(Dtype dtype);
AttentionPass attention_pass_sve256(Dtype dtype);
AttentionPass attention_pass_avx2(Dtype dtype);
AttentionPass attention_pass_avx512(Dtype dtype);
// Returns the pass for rows of bfloat16 and queries of bfloat16, whose scores are multiplied by
// AttentionState::factors. Returns null when this processor has no AVX512-BF16.
AttentionPass attention_pass_bf16();
// Returns the pass for rows of 4-bit codes of which fits_integers() is true. Its sums are in the
// order of integer_place(). Returns null when this processor has no AVX512-VNNI.
AttentionPass attention_pass_integers(size_t groups);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_PASS_H_
