#include "kernels/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "kernels/attention_check.h"
#include "kernels/attention_numbers.h"
#include "kernels/attention_pass.h"
#include "kernels/attention_rows.h"

namespace cxl_offload {
namespace {

// Work is cut into about so many units, whatever the team, so that the result does not depend on
// it; but no shorter than kFewestRows, which is what a merge of partial results costs little
// beside.
constexpr int64_t kUnits = 512;
constexpr int64_t kFewestRows = 256;
// Heads that lie next to each other in a row of the cache are read together, up to so many bytes:
// alone they would be a line or two at a time, far apart.
constexpr size_t kTileBytes = 4096;
constexpr size_t kTileQueries = 32;
constexpr size_t kFewestAhead = 4;
constexpr size_t kAheadBytes = 8192;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

AttentionPass find_pass(Dtype dtype, Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return attention_pass_avx512(dtype);
    case Isa::kAvx2:
      return attention_pass_avx2(dtype);
    case Isa::kScalar:
      break;
  }
  return attention_pass_scalar(dtype);
}

// Some heads over some positions of one sequence.
struct Unit {
  int64_t batch = 0;
  int64_t head = 0;  // of K and V, the first
  int64_t heads = 0;
  int64_t begin = 0;
  int64_t end = 0;
  size_t place = 0;  // of its first query in the partial results
};

size_t row_bytes(const TensorView& view) {
  return static_cast<size_t>(view.shape[3]) * dtype_bytes(view.dtype);
}

size_t padded_dim(const Attention& a) {
  if (a.k.dtype == Dtype::kUint8) return static_cast<size_t>(a.k.shape[3]) * 2;
  return (static_cast<size_t>(a.q.shape[2]) + kAttentionPad - 1) / kAttentionPad * kAttentionPad;
}

// For codes multiplied as integers; null: as numbers.
AttentionPass find_integers(const Attention& a, Isa isa) {
  if (a.k.dtype != Dtype::kUint8 || isa != Isa::kAvx512 || !a.integers) return nullptr;
  const auto groups = static_cast<size_t>(a.k_groups.shape[3]);
  return fits_integers(groups, padded_dim(a) / groups) ? attention_pass_integers(groups) : nullptr;
}

size_t isa_lanes(Isa isa) {
  if (isa == Isa::kScalar) return 1;
  return isa == Isa::kAvx2 ? 8 : 16;
}

int64_t tile_heads(const Attention& a) {
  const int64_t heads = a.k.shape[1];
  const bool side_by_side = a.k.strides[1] < a.k.strides[2] && a.v.strides[1] < a.v.strides[2];
  if (!side_by_side || a.k.strides[1] < 0 || a.v.strides[1] < 0) return 1;
  const size_t row = row_bytes(a.k);
  const size_t group = static_cast<size_t>(a.q.shape[1] / heads);
  const size_t most = std::min(kTileBytes / std::max(row, size_t{1}), kTileQueries / group);
  return std::clamp(static_cast<int64_t>(most), int64_t{1}, heads);
}

class Run {
 public:
  Run(const Attention& attention, Isa isa)
      : a_(attention),
        integers_(find_integers(attention, isa)),
        pass_(integers_ != nullptr ? integers_ : find_pass(attention.k.dtype, isa)),
        heads_(attention.q.shape[1]),
        kv_heads_(attention.k.shape[1]),
        group_(static_cast<size_t>(heads_ / kv_heads_)),
        dim_(static_cast<size_t>(attention.q.shape[2])),
        padded_(padded_dim(attention)),
        lanes_(attention.k.dtype == Dtype::kUint8 ? isa_lanes(isa) : 0) {
    cut();
    read_queries();
    sums_.resize(queries_ * padded_);
    most_.assign(queries_, kLowest);
    total_.assign(queries_, 0);
  }

  void work(WorkerTeam& team) {
    const size_t slots = units_.size() < 2 ? 1 : team.threads();
    scores_.resize(slots * scores_each());
    scales_.resize(slots * scales_each());
    halves_.resize(slots * scales_each());
    whole_.resize(slots * whole_each());
    if (units_.size() < 2) {
      for (const Unit& unit : units_) attend(unit, 0);
      return;
    }
    std::atomic<size_t> taken = 0;
    std::atomic<size_t> next = 0;
    team.run([&](size_t) {
      const size_t slot = taken.fetch_add(1);
      while (true) {
        const size_t index = next.fetch_add(1, std::memory_order_relaxed);
        if (index >= units_.size()) return;
        attend(units_[index], slot);
      }
    });
  }

  // Partial results of one query become one, in the order of the positions.
  void merge() {
    const size_t count = static_cast<size_t>(a_.q.shape[0] * heads_);
    std::vector<std::vector<size_t>> parts(count);
    for (const Unit& unit : units_) {
      const size_t queries = static_cast<size_t>(unit.heads) * group_;
      const auto first =
          static_cast<size_t>(unit.batch * heads_) + static_cast<size_t>(unit.head) * group_;
      for (size_t i = 0; i < queries; ++i) parts[first + i].push_back(unit.place + i);
    }
    std::vector<double> sums(dim_);
    for (size_t query = 0; query < count; ++query) merge_query(query, parts[query], sums);
  }

 private:
  void cut() {
    const int64_t batch = a_.q.shape[0];
    tile_ = tile_heads(a_);
    const int64_t tiles = (kv_heads_ + tile_ - 1) / tile_;
    int64_t rows = 0;
    for (int64_t i = 0; i < batch; ++i) rows += length(i) - begin(i);
    const int64_t most = std::max(kFewestRows, (rows * tiles + kUnits - 1) / kUnits);
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t mine = length(i) - begin(i);
      const int64_t parts = (mine + most - 1) / most;
      for (int64_t head = 0; head < kv_heads_; head += tile_) {
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t from = begin(i) + mine * part / parts;
          const int64_t to = begin(i) + mine * (part + 1) / parts;
          const int64_t heads = std::min(tile_, kv_heads_ - head);
          units_.push_back({i, head, heads, from, to, queries_});
          queries_ += static_cast<size_t>(heads) * group_;
        }
      }
    }
  }

  int64_t length(int64_t batch) const {
    return a_.lengths.empty() ? a_.k.shape[2] : a_.lengths[static_cast<size_t>(batch)];
  }
  int64_t begin(int64_t batch) const {
    return a_.window == 0 ? 0 : std::max(int64_t{0}, length(batch) - a_.window);
  }

  void read_queries() {
    const size_t count = static_cast<size_t>(a_.q.shape[0] * heads_);
    q_.resize(count * padded_);
    for (size_t query = 0; query < count; ++query) {
      const double scale = a_.scale * scale_of_head(a_.k_scales, kv_head(query));
      for (size_t i = 0; i < dim_; ++i) {
        const double value = read_number(a_.q.data, a_.q.dtype, query * dim_ + i);
        q_[query * padded_ + place(i)] = static_cast<float>(value * scale);
      }
    }
  }

  size_t kv_head(size_t query) const { return query % static_cast<size_t>(heads_) / group_; }

  // Where number i of a head is in queries, and in sums.
  size_t place(size_t i) const { return lanes_ == 0 ? i : code_place(i, lanes_); }

  size_t sum_place(size_t i) const {
    return integers_ == nullptr ? place(i) : integer_place(i, padded_ / 64);
  }

  // What a thread writes to while it works.
  size_t scores_each() const { return static_cast<size_t>(tile_) * group_ * kAttentionBlock; }
  size_t scales_each() const {
    if (lanes_ == 0) return 0;
    const auto groups = static_cast<size_t>(tile_ * a_.k_groups.shape[3]);
    return kAttentionScaleRows * groups * 2 + kAttentionPad;
  }

  size_t whole_each() const {
    return integers_ == nullptr ? 0 : static_cast<size_t>(tile_) * group_;
  }

  void attend(const Unit& unit, size_t slot) {
    AttentionState state;
    state.kv_heads = static_cast<size_t>(unit.heads);
    state.group = group_;
    state.dim = dim_;
    state.padded = padded_;
    const auto first =
        static_cast<size_t>(unit.batch * heads_) + static_cast<size_t>(unit.head) * group_;
    state.q = q_.data() + first * padded_;
    state.sums = sums_.data() + unit.place * padded_;
    state.most = most_.data() + unit.place;
    state.total = total_.data() + unit.place;
    state.scores = scores_.data() + slot * scores_each();
    AttentionRows rows;
    rows.k_step = static_cast<size_t>(a_.k.strides[1]) * dtype_bytes(a_.k.dtype);
    rows.v_step = static_cast<size_t>(a_.v.strides[1]) * dtype_bytes(a_.v.dtype);
    if (lanes_ != 0) {
      rows.k_groups_step = static_cast<size_t>(a_.k_groups.strides[1]) * sizeof(F16);
      rows.v_groups_step = static_cast<size_t>(a_.v_groups.strides[1]) * sizeof(F16);
      state.groups = static_cast<size_t>(a_.k_groups.shape[3]);
      state.group_codes = padded_ / state.groups;
      state.inverse = a_.group_scales == GroupScales::kInverseLow;
      state.halves = halves_.data() + slot * scales_each();
      state.scales = scales_.data() + slot * scales_each();
      state.whole = whole_.data() + slot * whole_each();
    }
    const size_t row = static_cast<size_t>(unit.heads) * row_bytes(a_.k);
    rows.ahead = std::clamp(kAheadBytes / row, kFewestAhead, kAttentionAhead);
    RowBlocks blocks(a_, {a_, unit.batch, unit.begin, unit.end, unit.head}, rows);
    for (state.first = true; blocks.next(); state.first = false) pass_(rows, state);
  }

  void merge_query(size_t query, const std::vector<size_t>& parts, std::vector<double>& sums) {
    float most = kLowest;
    for (size_t part : parts) most = most_[part] > most ? most_[part] : most;
    std::ranges::fill(sums, 0);
    double total = 0;
    for (size_t part : parts) {
      if (most_[part] == kLowest && total_[part] == 0) continue;  // attended to nothing
      const double weight = std::exp(static_cast<double>(most_[part]) - most);
      total += weight * total_[part];
      const float* from = sums_.data() + part * padded_;
      for (size_t i = 0; i < dim_; ++i) sums[i] += weight * from[sum_place(i)];
    }
    const double scale = scale_of_head(a_.v_scales, kv_head(query)) / total;
    for (size_t i = 0; i < dim_; ++i) {
      const double value = total == 0 ? 0 : sums[i] * scale;
      write_number(a_.out.data, a_.out.dtype, query * dim_ + i, static_cast<float>(value));
    }
    if (a_.log_sum_exp == nullptr) return;
    a_.log_sum_exp[query] = total == 0 ? kLowest : static_cast<float>(most + std::log(total));
  }

  const Attention& a_;
  const AttentionPass integers_;  // null: numbers are multiplied
  const AttentionPass pass_;
  const int64_t heads_;
  const int64_t kv_heads_;
  const size_t group_;
  const size_t dim_;
  const size_t padded_;
  const size_t lanes_;  // of the instruction set, when caches are of codes
  int64_t tile_ = 1;
  size_t queries_ = 0;  // of all units together
  std::vector<Unit> units_;
  std::vector<float> q_;
  std::vector<float> sums_;
  std::vector<float> most_;
  std::vector<float> total_;
  std::vector<float> scores_;
  std::vector<float> scales_;
  std::vector<F16> halves_;
  std::vector<WholeQuery> whole_;
};

}  // namespace

bool has_integer_codes() {
  return best_isa() == Isa::kAvx512 && attention_pass_integers(1) != nullptr;
}

void run_attention(const Attention& attention, WorkerTeam& team, Isa isa) {
  check_attention(attention);
  if (attention.q.numel() == 0) return;
  Run run(attention, isa);
  run.work(team);
  run.merge();
}

}  // namespace cxl_offload
