// The inner loop of decode attention, built once for every instruction set.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_PASS_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_PASS_H_

#include <cstddef>
#include <cstdint>

#include "core/half.h"
#include "core/sizes.h"
#include "core/tensor_view.h"

namespace cxl_offload::kernels {

// Positions of a block: K is read for all of them, then V. Blocks are long enough that the rows of
// each stream from memory, and short enough that the scores between them stay in a near cache.
inline constexpr size_t kAttentionBlock = 256;
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
// and sums are kept in the order that this gives. Returns the place of code `index` of a row in it.
constexpr size_t code_place(size_t index, size_t lanes) {
  const size_t unit = index / (4 * lanes) * (4 * lanes);
  const size_t in_unit = index % (4 * lanes);
  return unit + in_unit % 4 * lanes + in_unit / 4;
}

// The place of the sum of code `index` when rows of one or two groups of 64 are multiplied as
// integers. Four bytes of codes make eight sums: first those of the upper codes, then those of the
// lower ones. The same four bytes of every 16 lie beside each other.
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

// A query whose numbers are sums of three signed digits, times `unit`. It has two halves, as a
// vector of codes has: the first and the second group, or twice the only one.
struct WholeQuery {
  alignas(kLineBytes)
      int8_t digits[2][3][kGroupCodes];  // of the upper codes of bytes, of the lower ones
  // In lanes of scales: by fours for the first and for the second group.
  alignas(kLineBytes) float unit[16];
  alignas(kLineBytes) float sum[16];     // of q
  alignas(kLineBytes) float middle[16];  // 8 times the sum of the whole numbers: bits of an int32
  bool fits;  // false: there are NaN, infinities, or numbers out of range
};

// Rows of one sequence: head h of row i begins at k[i] + h * k_step bytes.
struct AttentionRows {
  const std::byte* k[kAttentionBlock + kAttentionAhead];
  const std::byte* v[kAttentionBlock + kAttentionAhead];
  size_t k_step = 0;
  size_t v_step = 0;
  // Of codes: the scales of their groups, in the same way.
  const std::byte* k_groups[kAttentionBlock + kAttentionAhead];
  const std::byte* v_groups[kAttentionBlock + kAttentionAhead];
  size_t k_groups_step = 0;
  size_t v_groups_step = 0;
  int32_t positions[kAttentionBlock + kAttentionAhead];  // of rows, where ScoreRules ask for them
  bool k_in_line = false;  // and codes: those of the first head lie one row after another
  bool v_in_line = false;
  size_t ahead = 0;  // how many rows to ask for early
  size_t count = 0;  // at most a block; kAttentionAhead more are valid addresses
};

// How scores change before they become weights; see Attention.
struct ScoreRules {
  float soft_cap = 0;  // 0: none
  // Of the unit's sequence and first head: the number of head h, query i and position p is at
  // bias[h * head_step + i * query_step + p * step]. Null: none.
  const float* bias = nullptr;
  int64_t head_step = 0;
  int64_t query_step = 0;
  int64_t step = 0;
  size_t queries = 1;  // of a head, one after another
  // Query i sees positions [begin + i, end + i); what is beyond has no weight. Where they are all
  // of the rows there are no limits.
  bool limited = false;
  int64_t begin = 0;
  int64_t end = 0;

  bool need_positions() const { return bias != nullptr || limited; }
};

// The state of the queries of some heads after the rows so far.
struct AttentionState {
  size_t kv_heads = 0;
  size_t group = 0;  // queries of one head of K and V, of all heads that share it
  size_t dim = 0;
  size_t padded = 0;
  const float* q = nullptr;           // [kv_heads * group][padded], times the scale
  const ScoreRules* rules = nullptr;  // null: scores are weights as they are
  float* sums = nullptr;              // [kv_heads * group][padded]: of values times weights
  float* most = nullptr;              // [kv_heads * group]: the greatest score
  float* total = nullptr;             // [kv_heads * group]: of the weights, exp(score - most)
  float* scores = nullptr;            // [kv_heads * group][kAttentionBlock]
  // Of codes. A row of a head has `groups` of them, each of `group_codes`: `padded` together.
  size_t groups = 0;
  size_t group_codes = 0;
  bool inverse = false;  // (1 / step, low) is kept rather than (low, step)
  // Scratch of a thread: the scales of some rows, [kAttentionScaleRows][kv_heads][groups][2] and up
  // to a vector more, first as they are kept and then as (step, low).
  F16* halves = nullptr;
  float* scales = nullptr;
  // For products of integers: the whole queries, which a thread makes at the first rows of a unit.
  WholeQuery* whole = nullptr;
  // And kStagedRows rows of many heads.
  std::byte* staged = nullptr;
  bool first = false;
};

using AttentionPass = void (*)(const AttentionRows& rows, const AttentionState& state);

AttentionPass attention_pass_scalar(Dtype dtype);
AttentionPass attention_pass_neon(Dtype dtype);
AttentionPass attention_pass_avx2(Dtype dtype);
AttentionPass attention_pass_avx512(Dtype dtype);
// For rows of 4-bit codes that fit_integers(); sums are in the order of integer_place(). Null when
// this processor has no AVX512-VNNI.
AttentionPass attention_pass_integers(size_t groups);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_PASS_H_
