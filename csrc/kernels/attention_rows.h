// Which rows of K and V one unit of work attends to, and where they are.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_ROWS_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_ROWS_H_

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/attention_pass.h"

namespace cxl_offload {

// Rows of one head of K or V, by position within what the outermost index names.
struct HeadRows {
  HeadRows() = default;
  HeadRows(const TensorView& view, int64_t head) {
    const auto element = static_cast<int64_t>(dtype_bytes(view.dtype));
    base = view.data + head * view.strides[1] * element;
    outer_step = view.strides[0] * element;
    step = view.strides[2] * element;
  }
  const std::byte* at(int64_t outer, int64_t row) const {
    return base + outer * outer_step + row * step;
  }

  const std::byte* base = nullptr;
  int64_t outer_step = 0;
  int64_t step = 0;
};

// Addresses of the rows of one sequence that are attended, one after another.
class RowSource {
 public:
  RowSource(const Attention& a, int64_t batch, int64_t begin, int64_t end, int64_t head)
      : k_(a.k, head), v_(a.v, head), batch_(batch), at_(begin), end_(end) {
    if (a.mask != nullptr) mask_ = a.mask + batch * a.mask_columns;
    if (a.table.data != nullptr) blocks_ = a.table.data + batch * a.table.stride;
    block_ = a.k.shape[2];
    has_groups_ = a.k.dtype == Dtype::kUint8;
    if (!has_groups_) return;
    k_groups_ = {a.k_groups, head};
    v_groups_ = {a.v_groups, head};
  }

  // Puts the addresses of the next row at `to`; false: there is none.
  bool next(AttentionRows& rows, size_t to) {
    while (mask_ != nullptr && at_ < end_ && mask_[at_] == 0) ++at_;
    if (at_ >= end_) return false;
    const int64_t outer = blocks_ == nullptr ? batch_ : blocks_[at_ / block_];
    const int64_t row = blocks_ == nullptr ? at_ : at_ % block_;
    rows.k[to] = k_.at(outer, row);
    rows.v[to] = v_.at(outer, row);
    if (has_groups_) {
      rows.k_groups[to] = k_groups_.at(outer, row);
      rows.v_groups[to] = v_groups_.at(outer, row);
    }
    ++at_;
    return true;
  }

 private:
  HeadRows k_;
  HeadRows v_;
  HeadRows k_groups_;
  HeadRows v_groups_;
  bool has_groups_ = false;
  const uint8_t* mask_ = nullptr;
  const int32_t* blocks_ = nullptr;
  int64_t block_ = 1;
  int64_t batch_;
  int64_t at_;
  int64_t end_;
};

// The rows of a source, a block at a time, and beyond it those to be asked for early.
class RowBlocks {
 public:
  RowBlocks(RowSource source, AttentionRows& rows) : source_(source), rows_(rows) {}

  bool next() {
    constexpr size_t kAll = kAttentionBlock + kAttentionAhead;
    const size_t kept = held_ - rows_.count;
    for (size_t i = 0; i < kept; ++i) put(rows_.count + i, i);
    held_ = kept;
    while (held_ < kAll && source_.next(rows_, held_)) ++held_;
    rows_.count = std::min(held_, kAttentionBlock);
    if (held_ == 0) return false;
    for (size_t i = held_; i < kAll; ++i) put(held_ - 1, i);
    return true;
  }

 private:
  void put(size_t from, size_t to) {
    rows_.k[to] = rows_.k[from];
    rows_.v[to] = rows_.v[from];
    rows_.k_groups[to] = rows_.k_groups[from];
    rows_.v_groups[to] = rows_.v_groups[from];
  }

  RowSource source_;
  AttentionRows& rows_;
  size_t held_ = 0;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_ROWS_H_
