// Which rows of K and V one unit of work attends to, and where they are.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_ROWS_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_ROWS_H_

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "kernels/attention.h"
#include "kernels/attention_pass.h"

namespace cxl_offload::kernels {

// Where the rows of one head of K or V are. `outer` is a sequence, or a block of the cache, and
// `row` a position in it.
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

  // Writes the addresses of rows that are `step` apart into [to, end).
  void fill(int64_t outer, int64_t row, const std::byte** to, const std::byte** end) const {
    const std::byte* address = at(outer, row);
    for (; end - to >= 4; to += 4, address += 4 * step) {  // four independent additions
      to[0] = address;
      to[1] = address + step;
      to[2] = address + 2 * step;
      to[3] = address + 3 * step;
    }
    for (; to != end; ++to, address += step) *to = address;
  }

  // Writes the addresses of `turns` rows from `row` on, each followed by those that lie 1, 2 and 3
  // times `apart` rows later.
  void fill_turns(int64_t outer, int64_t row, int64_t apart, const std::byte** to,
                  size_t turns) const {
    const std::byte* address = at(outer, row);
    apart *= step;
    for (; turns > 0; --turns, to += 4, address += step) {
      to[0] = address;
      to[1] = address + apart;
      to[2] = address + 2 * apart;
      to[3] = address + 3 * apart;
    }
  }

  const std::byte* base = nullptr;
  int64_t outer_step = 0;
  int64_t step = 0;
};

// Gives the addresses of the attended rows of one sequence. Rows of numbers that lie one directly
// after another are cut into kStreams parts, which take turns: a processor reads several streams
// faster than one. On a Zen 4 four were up to a tenth faster than one, and eight were slower than
// four. Other rows come in order. The order does not depend on threads.
class RowSource {
 public:
  static constexpr int64_t kStreams = 4;

  RowSource(const Attention& a, int64_t batch, int64_t begin, int64_t end, int64_t head)
      : k_(a.k, head), v_(a.v, head), batch_(batch), begin_(begin), at_(begin), end_(end) {
    if (a.mask != nullptr) mask_ = a.mask + batch * a.mask_columns;
    if (a.table.data != nullptr) blocks_ = a.table.data + batch * a.table.stride;
    block_ = a.k.shape[2];
    numbered_ = a.needs_positions();
    has_groups_ = a.k.dtype == Dtype::kUint8;
    if (has_groups_) {
      k_groups_ = {a.k_groups, head};
      v_groups_ = {a.v_groups, head};
    } else if (plain() && end - begin >= kLeastInStreams && lies_in_line(a.k) &&
               lies_in_line(a.v)) {
      stream_ = (end - begin) / kStreams;
    }
  }

  // Whether the codes and scales of the next row directly follow those of a row, in K and in V.
  std::pair<bool, bool> in_line(const Attention& a) const {
    if (!has_groups_ || !plain()) return {false, false};
    const int64_t row = a.k.shape[3];
    const int64_t scales = a.k_groups.shape[3] * 2;
    return {a.k.strides[2] == row && a.k_groups.strides[2] == scales,
            a.v.strides[2] == row && a.v_groups.strides[2] == scales};
  }

  // Writes the addresses of the next rows from place `held` on, up to place `all`. Returns how many
  // places are filled then.
  size_t fill(AttentionRows& rows, size_t held, size_t all) {
    if (!plain()) return fill_some(rows, held, all);
    const auto left = static_cast<size_t>(end_ - at_);
    const size_t end = std::min(all, held + left);
    for (size_t i = held; numbered_ && i < end; ++i) {
      rows.positions[i] = static_cast<int32_t>(position(at_ + static_cast<int64_t>(i - held)));
    }
    if (stream_ != 0) {
      fill_streams(rows, held, end);
    } else {
      k_.fill(batch_, at_, rows.k + held, rows.k + end);
      v_.fill(batch_, at_, rows.v + held, rows.v + end);
    }
    if (has_groups_) {
      k_groups_.fill(batch_, at_, rows.k_groups + held, rows.k_groups + end);
      v_groups_.fill(batch_, at_, rows.v_groups + held, rows.v_groups + end);
    }
    at_ += static_cast<int64_t>(end - held);
    return end;
  }

  // Copies what is known of a row to another place.
  void copy(AttentionRows& rows, size_t from, size_t to) const {
    rows.k[to] = rows.k[from];
    rows.v[to] = rows.v[from];
    if (numbered_) rows.positions[to] = rows.positions[from];
    if (!has_groups_) return;
    rows.k_groups[to] = rows.k_groups[from];
    rows.v_groups[to] = rows.v_groups[from];
  }

 private:
  // With fewer rows, a part would be a page or less, and the processor does not find the next one.
  static constexpr int64_t kLeastInStreams = 128;

  static bool lies_in_line(const TensorView& view) { return view.strides[2] == view.shape[3]; }

  // The position of the row that is read when `at` rows, counted from the first position on, are.
  int64_t position(int64_t at) const {
    const int64_t index = at - begin_;
    if (index >= stream_ * kStreams) return at;
    return begin_ + index % kStreams * stream_ + index / kStreams;
  }

  void fill_streams(AttentionRows& rows, size_t held, size_t end) const {
    int64_t at = at_;
    const int64_t index = at - begin_, left = stream_ * kStreams - index;
    if (index % kStreams == 0 && left > 0) {
      const auto turns = std::min((end - held) / kStreams, static_cast<size_t>(left) / kStreams);
      k_.fill_turns(batch_, position(at), stream_, rows.k + held, turns);
      v_.fill_turns(batch_, position(at), stream_, rows.v + held, turns);
      held += turns * kStreams;
      at += static_cast<int64_t>(turns) * kStreams;
    }
    for (; held < end; ++held, ++at) {
      rows.k[held] = k_.at(batch_, position(at));
      rows.v[held] = v_.at(batch_, position(at));
    }
  }

  size_t fill_some(AttentionRows& rows, size_t held, size_t all) {
    for (; held < all && at_ < end_; ++at_) {
      if (mask_ != nullptr && mask_[at_] == 0) continue;
      const int64_t outer = blocks_ == nullptr ? batch_ : blocks_[at_ / block_];
      const int64_t row = blocks_ == nullptr ? at_ : at_ % block_;
      if (numbered_) rows.positions[held] = static_cast<int32_t>(at_);
      rows.k[held] = k_.at(outer, row);
      rows.v[held] = v_.at(outer, row);
      if (has_groups_) {
        rows.k_groups[held] = k_groups_.at(outer, row);
        rows.v_groups[held] = v_groups_.at(outer, row);
      }
      ++held;
    }
    return held;
  }

  bool plain() const { return mask_ == nullptr && blocks_ == nullptr; }

  HeadRows k_;
  HeadRows v_;
  HeadRows k_groups_;
  HeadRows v_groups_;
  bool has_groups_ = false;
  bool numbered_ = false;
  const uint8_t* mask_ = nullptr;
  const int32_t* blocks_ = nullptr;
  int64_t block_ = 1;
  int64_t batch_;
  int64_t stream_ = 0;  // how many rows of a stream take turns; 0: rows come in order
  int64_t begin_;
  int64_t at_;
  int64_t end_;
};

// Gives the rows of a source block by block, and after each block the rows to prefetch.
class RowBlocks {
 public:
  RowBlocks(const Attention& a, RowSource source, AttentionRows& rows)
      : source_(source),
        rows_(rows),
        block_(a.k.dtype == Dtype::kUint8 ? kAttentionCodesBlock : kAttentionBlock) {
    std::tie(rows.k_in_line, rows.v_in_line) = source.in_line(a);
  }

  // Says whose rows to prefetch after those of the source.
  void follow_with(RowSource later) { later_ = later; }

  bool next() {
    const size_t all = block_ + kAttentionAhead;
    const size_t kept = held_ - rows_.count;
    for (size_t i = 0; i < kept; ++i) source_.copy(rows_, rows_.count + i, i);
    held_ = source_.fill(rows_, kept, all);
    rows_.count = std::min(held_, block_);
    if (held_ == 0) return false;
    // Passes may read rows up to a whole number of kAttentionPad, so these belong to the source.
    size_t known = std::max(held_, round_up(rows_.count, kAttentionPad));
    const size_t end = rows_.count + kAttentionAhead;
    for (size_t i = held_; i < known; ++i) source_.copy(rows_, held_ - 1, i);
    if (known < end && later_.has_value()) known = RowSource(*later_).fill(rows_, known, end);
    for (size_t i = known; i < end; ++i) source_.copy(rows_, known - 1, i);
    return true;
  }

 private:
  RowSource source_;
  std::optional<RowSource> later_;
  AttentionRows& rows_;
  const size_t block_;  // positions
  size_t held_ = 0;     // how many rows of the source have their places
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_ROWS_H_
