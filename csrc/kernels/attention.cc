#include "kernels/attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>

#include "core/float8.h"
#include "kernels/attention_check.h"
#include "kernels/attention_numbers.h"
#include "kernels/attention_pass.h"
#include "kernels/attention_queues.h"
#include "kernels/attention_rows.h"
#include "kernels/attention_work.h"
#include "kernels/measured_choice.h"

namespace cxl_offload::kernels {
namespace {

// A pass reads up to 8 rows side by side, where a unit has several heads.
constexpr size_t kFewestAhead = 8;
constexpr size_t kAheadBytes = 8192;
constexpr size_t kLeastTriedBytes = size_t{16} << 20;

// Whole calls find out how rows are prefetched. It depends on the processor, on how fast its memory
// is at the time, and on how rows lie: on a Zen 4, one head's rows that follow one another are read
// fastest without prefetches, and short pieces of rows with them.
constexpr std::array kRowPrefetches = {Prefetch::kSecond, Prefetch::kNearest, Prefetch::kNone};
using RowChoice = MeasuredChoice<kRowPrefetches.size(), 12>;

RowChoice& row_choice_of(Dtype dtype, bool several_heads) {
  static std::array<std::array<RowChoice, 2>, static_cast<size_t>(Dtype::kUint8) + 1> choices;
  return choices[static_cast<size_t>(dtype)][several_heads ? 1 : 0];
}

constexpr float kLowest = -std::numeric_limits<float>::infinity();

AttentionPass find_pass(Dtype dtype, Isa isa) {
  constexpr OfIsa<AttentionPass (*)(Dtype)> kEach{attention_pass_scalar, attention_pass_neon,
                                                  attention_pass_sve256, attention_pass_avx2,
                                                  attention_pass_avx512};
  return kEach.at(isa)(dtype);
}

size_t padded_dim(const Attention& a) {
  if (a.k.dtype == Dtype::kUint8) return static_cast<size_t>(a.k.shape[3]) * 2;
  return (static_cast<size_t>(a.q.shape[2]) + kAttentionPad - 1) / kAttentionPad * kAttentionPad;
}

// The pass that multiplies codes as integers; null where codes become numbers instead.
AttentionPass find_integers(const Attention& a, Isa isa) {
  if (a.k.dtype != Dtype::kUint8 || isa != Isa::kAvx512 || !a.integers) return nullptr;
  const auto groups = static_cast<size_t>(a.k_groups.shape[3]);
  return fits_integers(groups, padded_dim(a) / groups) ? attention_pass_integers(groups) : nullptr;
}

// The pass that multiplies queries and keys of bfloat16; null where they become float32.
AttentionPass find_bf16(const Attention& a, Isa isa) {
  const bool are_bf16 = a.q.dtype == Dtype::kBfloat16 && a.k.dtype == Dtype::kBfloat16;
  return are_bf16 && isa == Isa::kAvx512 && a.bf16_products ? attention_pass_bf16() : nullptr;
}

size_t isa_lanes(Isa isa) {
  constexpr OfIsa<size_t> kLanes{1, 4, 8, 8, 16};
  return kLanes.at(isa);
}

class Run {
 public:
  Run(const Attention& attention, Isa isa)
      : a_(attention),
        integers_(find_integers(attention, isa)),
        bf16_(find_bf16(attention, isa)),
        pass_(integers_ != nullptr ? integers_
              : bf16_ != nullptr   ? bf16_
                                   : find_pass(attention.k.dtype, isa)),
        work_(attention),
        heads_(attention.q.shape[1]),
        kv_heads_(attention.k.shape[1]),
        group_(static_cast<size_t>(heads_ / kv_heads_)),
        dim_(static_cast<size_t>(attention.q.shape[2])),
        padded_(padded_dim(attention)),
        codes_(attention.k.dtype == Dtype::kUint8),
        row_choice_(row_choice_of(attention.k.dtype, work_.tile > 1)) {
    find_places(isa_lanes(isa));
    sums_ = std::make_unique_for_overwrite<float[]>(work_.queries * padded_);
    most_.assign(work_.queries, kLowest);
    total_.assign(work_.queries, 0);
  }

  void work(WorkerTeam& team, const os::Kernel* kernel) {
    const std::vector<Unit>& units = work_.units;
    const size_t slots = units.size() < 2 ? 1 : team.threads();
    q_.resize(slots * queries_each());
    scores_.resize(slots * scores_each());
    scales_.resize(slots * scales_each());
    halves_.resize(slots * scales_each());
    divided_.resize(slots * divided_each());
    whole_.resize(slots * whole_each());
    factors_.resize(slots * factors_each());
    staged_.resize(slots * staged_each());
    for (size_t i = 0; i < work_.parts.size(); ++i) {
      if (work_.parts[i].count == 0) merge(i);
    }
    if (units.size() < 2) {
      prefetch_ = kRowPrefetches[row_choice_.way()];
      for (const Unit& unit : units) attend(unit, nullptr, 0);
      return;
    }
    WorkQueues<size_t> queues = queues_of(a_, units, team, kernel);
    std::atomic<size_t> taken = 0;
    row_choice_.run(tried_bytes(), kLeastTriedBytes, [&](size_t way) {
      prefetch_ = kRowPrefetches[way];
      team.run([&](size_t group) {
        const size_t slot = taken.fetch_add(1);
        queues.drain(group, [&](size_t index, const size_t* next) {
          attend(units[index], next == nullptr ? nullptr : &units[*next], slot);
        });
      });
    });
  }

 private:
  // The bytes by which calls are compared. Codes are prefetched in one way. What lies in the
  // processor's own caches says nothing of the memory: small caches of keys and values, and those
  // that are one row again and again.
  size_t tried_bytes() const {
    if (codes_ || a_.k.strides[2] == 0) return 0;
    size_t rows = 0;
    for (const Unit& unit : work_.units) {
      rows += static_cast<size_t>((unit.end - unit.begin) * unit.heads);
    }
    return 2 * rows * row_bytes(a_.k);
  }

  // Writes the queries from `first` on as a pass reads them. Each unit reads its own: read by one
  // thread for all, they took a fifth of the time of a cache with many queries.
  void read_queries(size_t first, size_t count, float* to) const {
    visit_numbers(a_.q.data, a_.q.dtype, [&](const auto* numbers) {
      const auto* from = numbers + first * dim_;
      for (size_t query = first; query < first + count; ++query, to += padded_) {
        const double scale = a_.scale * scale_of_head(a_.k_scales, kv_head(query)) * unit();
        for (size_t i = 0; i < dim_; ++i, ++from) {
          to[places_[i]] = static_cast<float>(static_cast<double>(to_float(*from)) * scale);
        }
      }
    });
  }

  // Does the same for products of bfloat16. The scale is a power of two, by which queries are
  // multiplied exactly, times the factor of their scores, 1 or more: no score overflows on the way.
  void copy_queries(size_t first, size_t count, float* to, float* factors) const {
    const auto* from = reinterpret_cast<const Bf16*>(a_.q.data) + first * dim_;
    for (size_t i = 0; i < count; ++i, to += padded_) {
      const double scale = a_.scale * scale_of_head(a_.k_scales, kv_head(first + i));
      int exponent = 0;
      const double fraction = std::frexp(scale, &exponent);
      const double power = scale == 0 ? 0 : std::ldexp(1, exponent - 1);
      factors[i] = scale == 0 ? 1 : static_cast<float>(2 * fraction);
      auto* numbers = reinterpret_cast<Bf16*>(to);
      for (size_t at = 0; at < dim_; ++at, ++from) {
        numbers[at] = to_bf16(static_cast<float>(static_cast<double>(to_float(*from)) * power));
      }
    }
  }

  // The factor that turns a number of K or V, as a pass reads it, into its value.
  double unit() const { return a_.k.dtype == Dtype::kFloat8E4m3 ? kE4m3Unit : 1; }

  size_t kv_head(size_t query) const { return query % static_cast<size_t>(heads_) / group_; }

  void find_places(size_t lanes) {
    const bool pairs = a_.k.dtype == Dtype::kBfloat16;
    for (size_t i = 0; i < dim_; ++i) {
      const size_t in_pair = pairs ? pair_place(i, lanes, dim_) : i;
      const size_t place = codes_ ? code_place(i, lanes) : in_pair;
      places_.push_back(place);
      sum_places_.push_back(integers_ == nullptr ? place : integer_place(i, padded_ / kGroupCodes));
    }
  }

  // How many elements of each of the vectors below belong to one thread, which writes to them.
  size_t queries_each() const { return static_cast<size_t>(work_.tile) * group_ * padded_; }
  size_t scores_each() const { return static_cast<size_t>(work_.tile) * group_ * kAttentionBlock; }
  size_t scales_each() const {
    if (!codes_) return 0;
    const auto groups = static_cast<size_t>(work_.tile * a_.k_groups.shape[3]);
    return kAttentionScaleRows * groups * 2 + kAttentionPad;
  }

  size_t divided_each() const {
    if (!codes_) return 0;
    const auto groups = static_cast<size_t>(a_.k_groups.shape[3]);
    return static_cast<size_t>(work_.tile) * group_ * (padded_ + groups * kAttentionPad);
  }

  size_t factors_each() const {
    return bf16_ == nullptr ? 0 : static_cast<size_t>(work_.tile) * group_;
  }

  size_t whole_each() const {
    return integers_ == nullptr ? 0 : static_cast<size_t>(work_.tile) * group_;
  }

  size_t staged_each() const {  // in lines; see StagedRows
    if (integers_ == nullptr || work_.tile == 1) return 0;
    const size_t row = static_cast<size_t>(work_.tile) * (padded_ / kGroupCodes) *
                       (kGroupCodes / 2 + 2 * sizeof(F16));
    return kStagedRows * (row / sizeof(StagedLine) + 3);
  }

  // `next` is the unit that this thread turns to afterwards, if there is one. Its first rows are
  // prefetched while the last of this unit are read.
  void attend(const Unit& unit, const Unit* next, size_t slot) {
    AttentionState state;
    state.kv_heads = static_cast<size_t>(unit.heads);
    state.group = group_;
    state.dim = dim_;
    state.padded = padded_;
    const auto first =
        static_cast<size_t>(unit.batch * heads_) + static_cast<size_t>(unit.head) * group_;
    const size_t queries = static_cast<size_t>(unit.heads) * group_;
    float* q = q_.data() + slot * queries_each();
    state.q = q;
    if (bf16_ == nullptr) {
      read_queries(first, queries, q);
    } else {
      float* factors = factors_.data() + slot * factors_each();
      copy_queries(first, queries, q, factors);
      state.factors = factors;
    }
    state.sums = sums_.get() + unit.place * padded_;
    std::fill_n(state.sums, queries * padded_, 0.0f);
    state.most = most_.data() + unit.place;
    state.total = total_.data() + unit.place;
    state.scores = scores_.data() + slot * scores_each();
    const ScoreRules rules = rules_of(unit);
    const bool ruled = rules.soft_cap != 0 || a_.needs_positions();
    state.rules = ruled ? &rules : nullptr;
    AttentionRows rows;
    rows.k_step = static_cast<size_t>(a_.k.strides[1]) * dtype_bytes(a_.k.dtype);
    rows.v_step = static_cast<size_t>(a_.v.strides[1]) * dtype_bytes(a_.v.dtype);
    if (codes_) take_codes(rows, state, slot);
    const size_t row = static_cast<size_t>(unit.heads) * row_bytes(a_.k);
    rows.ahead = std::clamp(kAheadBytes / row, kFewestAhead, kAttentionAhead);
    RowBlocks blocks(a_, rows_of(unit), rows);
    if (next != nullptr) blocks.follow_with(rows_of(*next));
    rows.prefetch = prefetch_;
    for (state.first = true; blocks.next(); state.first = false) pass_(rows, state);
    // The thread that is last joins the parts. It joins them in their order, so the result is the
    // same whichever thread is last.
    if (work_.parts[unit.part].left.fetch_sub(1, std::memory_order_acq_rel) == 1) merge(unit.part);
  }

  // Says where the scales of codes are, and what memory a thread has for them.
  void take_codes(AttentionRows& rows, AttentionState& state, size_t slot) {
    rows.k_groups_step = static_cast<size_t>(a_.k_groups.strides[1]) * sizeof(F16);
    rows.v_groups_step = static_cast<size_t>(a_.v_groups.strides[1]) * sizeof(F16);
    state.groups = static_cast<size_t>(a_.k_groups.shape[3]);
    state.group_codes = padded_ / state.groups;
    state.inverse = a_.group_scales == GroupScales::kInverseLow;
    state.halves = halves_.data() + slot * scales_each();
    state.scales = scales_.data() + slot * scales_each();
    state.divided = divided_.data() + slot * divided_each();
    state.whole = whole_.data() + slot * whole_each();
    state.staged = reinterpret_cast<std::byte*>(staged_.data() + slot * staged_each());
  }

  RowSource rows_of(const Unit& unit) const {
    return {a_, unit.batch, unit.begin, unit.end, unit.head};
  }

  ScoreRules rules_of(const Unit& unit) const {
    ScoreRules rules;
    rules.soft_cap = static_cast<float>(a_.soft_cap);
    rules.queries = static_cast<size_t>(a_.queries);
    if (a_.bias.data != nullptr) {
      const std::vector<int64_t>& steps = a_.bias.strides;
      const int64_t head = unit.head * static_cast<int64_t>(group_) / a_.queries;
      rules.bias =
          reinterpret_cast<const float*>(a_.bias.data) + unit.batch * steps[0] + head * steps[1];
      rules.head_step = steps[1];
      rules.query_step = steps[2];
      rules.step = steps[3];
    }
    rules.limited = a_.limits_queries();
    rules.end = Work::first_end(a_, unit.batch);
    rules.begin = a_.window == 0 ? std::numeric_limits<int32_t>::min() : rules.end - a_.window;
    return rules;
  }

  float sink_of(size_t query) const {
    if (a_.sinks.empty()) return kLowest;
    return a_.sinks[query % static_cast<size_t>(heads_) / static_cast<size_t>(a_.queries)];
  }

  // Joins the partial results of the queries of some heads.
  void merge(size_t index) {
    const Parts& parts = work_.parts[index];
    const size_t queries = static_cast<size_t>(parts.heads) * group_;
    const auto first =
        static_cast<size_t>(parts.batch * heads_) + static_cast<size_t>(parts.head) * group_;
    std::vector<double> sums(padded_);
    for (size_t i = 0; i < queries; ++i)
      merge_query(first + i, parts.place + i, queries, parts, sums);
  }

  // Joins the results of one query. Its part `i` is at place + i * step.
  void merge_query(size_t query, size_t place, size_t step, const Parts& parts,
                   std::vector<double>& sums) {
    const size_t end = place + parts.count * step;
    float most = kLowest;
    for (size_t part = place; part < end; part += step) {
      most = most_[part] > most ? most_[part] : most;
    }
    std::ranges::fill(sums, 0);
    double total = 0;
    const float sink = sink_of(query);
    if (sink > kLowest) {
      most = sink > most ? sink : most;
      total = std::exp(static_cast<double>(sink) - most);
    }
    for (size_t part = place; part < end; part += step) {
      if (most_[part] == kLowest && total_[part] == 0) continue;  // attended to nothing
      const double weight = std::exp(static_cast<double>(most_[part]) - most);
      total += weight * total_[part];
      const float* from = sums_.get() + part * padded_;
      for (size_t i = 0; i < padded_; ++i) sums[i] += weight * from[i];
    }
    const double scale = scale_of_head(a_.v_scales, kv_head(query)) * unit() / total;
    write_numbers(a_.out.data, a_.out.dtype, query * dim_, dim_, [&](size_t i) {
      return static_cast<float>(total == 0 ? 0 : sums[sum_places_[i]] * scale);
    });
    if (a_.log_sum_exp == nullptr) return;
    a_.log_sum_exp[query] = total == 0 ? kLowest : static_cast<float>(most + std::log(total));
  }

  const Attention& a_;
  const AttentionPass integers_;  // null where numbers are multiplied
  const AttentionPass bf16_;      // null where numbers become float32
  const AttentionPass pass_;
  Work work_;
  const int64_t heads_;  // heads times the queries of each
  const int64_t kv_heads_;
  const size_t group_;
  const size_t dim_;
  const size_t padded_;
  const bool codes_;  // whether caches are codes
  RowChoice& row_choice_;
  Prefetch prefetch_ = Prefetch::kSecond;
  std::vector<size_t> places_;      // where the numbers of a head are in a query
  std::vector<size_t> sum_places_;  // where they are in the sums
  std::vector<float> q_;
  std::unique_ptr<float[]> sums_;  // attend() sets those of its unit to zero
  std::vector<float> most_;
  std::vector<float> total_;
  std::vector<float> scores_;
  std::vector<float> scales_;
  std::vector<F16> halves_;
  std::vector<float> divided_;
  std::vector<WholeQuery> whole_;
  std::vector<float> factors_;
  std::vector<StagedLine> staged_;
};

}  // namespace

void run_attention(const Attention& attention, WorkerTeam& team, Isa isa,
                   const os::Kernel* kernel) {
  check_attention(attention);
  if (attention.q.numel() == 0) return;
  Run run(attention, isa);
  run.work(team, kernel);
}

}  // namespace cxl_offload::kernels
