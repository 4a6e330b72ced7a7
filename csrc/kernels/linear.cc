#include "kernels/linear.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory>

#include "core/float8.h"
#include "core/rounding.h"
#include "kernels/kept.h"
#include "kernels/linear_check.h"
#include "kernels/linear_kernel.h"
#include "kernels/linear_pass.h"
#include "kernels/measured_choice.h"
#include "kernels/page_home.h"
#include "kernels/work_queues.h"

namespace cxl_offload::kernels {
namespace {

// The bytes of weights that a thread takes at a time. It is long enough for the prefetchers to run,
// and short enough that a thread which loses its CPU for a while does not hold up the others.
constexpr size_t kUnitBytes = size_t{1} << 20;
// With fewer bytes than this, waking threads would take longer than the work.
constexpr size_t kFewestBytes = size_t{64} << 10;
constexpr size_t kUnitsPerThread = 8;
// With fewer numbers of x than this, one thread arranges them before another is awake.
constexpr size_t kFewestShared = size_t{1} << 16;
// The sums of a unit, of which every thread keeps one. Narrow layers with many rows have more sums
// than weights.
constexpr size_t kMostSums = size_t{1} << 20;
constexpr size_t kLineFloats = 16;
// What a thread keeps of each array from one call to the next, which is enough for 64 rows of wide
// layers.
constexpr size_t kMostKept = size_t{1} << 20;

// How many weights a unit, and a layer, has at least by which a way is chosen.
constexpr size_t kLeastTried = size_t{1} << 16;
constexpr size_t kLeastLayerTried = size_t{1} << 19;

// The arrays of the calls of one thread, which its team writes and reads.
struct CallRoom {
  Kept<float> numbers;
  Kept<float> sums;
  Kept<float> tables;
};

CallRoom& room_of_this_thread() {
  static thread_local CallRoom room;
  return room;
}

using ColumnChoice = MeasuredChoice<kNearBytes.size()>;

template <class Choice, size_t kMost>
using ChoicesOfTypes =
    std::array<std::array<Choice, kMost + 1>, static_cast<size_t>(Dtype::kUint8) + 1>;

// Which of kNearBytes is fastest for weights of a type and so many tiles.
ColumnChoice& column_choice_of(Dtype weight, size_t tiles) {
  constexpr size_t kMostTiles = 8;  // the weights come from memory for a small part of the time
  static ChoicesOfTypes<ColumnChoice, kMostTiles> choices;
  return choices[static_cast<size_t>(weight)][std::min(tiles, kMostTiles)];
}

constexpr std::array kWeightPrefetches = {Prefetch::kNearest, Prefetch::kSecond, Prefetch::kNone};
using WeightChoice = MeasuredChoice<kWeightPrefetches.size(), 12>;

// In which of these ways a single tile of so many rows prefetches weights of a type. An EPYC of
// Zen 4 reads them fastest through the second cache, and beside one row without prefetches
// (docs/linear-measured.md).
WeightChoice& weight_choice_of(Dtype weight, size_t rows) {
  constexpr size_t kMostRows = 8;  // with more, no strip is spread
  static ChoicesOfTypes<WeightChoice, kMostRows> choices;
  return choices[static_cast<size_t>(weight)][std::min(rows, kMostRows)];
}

// Reads numbers of any type that y may have as float.
std::vector<float> floats_of(const TensorView& view, const LinearKernel& widen) {
  const size_t count = view.numel();
  std::vector<float> numbers(round_up(count, kLinearPad));
  LinearInput input;
  input.x = view.data;
  input.dtype = view.dtype;
  input.rows = input.tile = 1;
  input.width = count;
  input.to = numbers.data();
  input.to_step = numbers.size();
  widen.prepare(input);
  return numbers;
}

// A unit of work: some outputs.
struct Outputs {
  size_t begin = 0;
  size_t end = 0;
};

class LinearRun {
 public:
  LinearRun(const Linear& linear, Isa isa)
      : a_(linear),
        kernel_(linear_kernel(linear, isa)),
        width_(static_cast<size_t>(linear.x.shape[1])),
        outputs_(static_cast<size_t>(linear.weight.shape[0])),
        rows_(static_cast<size_t>(linear.x.shape[0])),
        groups_(is_codes(linear) ? static_cast<size_t>(linear.groups.shape[1]) : 0),
        x_step_(round_up(width_, kLinearPad) + round_up(2 * groups_ + 1, kLinearPad)),
        row_bytes_(static_cast<size_t>(linear.weight.shape[1]) * dtype_bytes(linear.weight.dtype)) {
    tile_ = kernel_.tile_of(rows_);
    padded_rows_ = round_up(rows_, tile_);  // rows beyond the last are zeros
    column_choice_ = &column_choice_of(linear.weight.dtype, padded_rows_ / tile_);
    weight_choice_ = &weight_choice_of(linear.weight.dtype, tile_);
    read_factors(isa);
  }
  ~LinearRun() {
    for (Kept<float>* each : {&room_.numbers, &room_.sums, &room_.tables}) {
      each->keep_at_most(kMostKept);
    }
  }
  LinearRun(const LinearRun&) = delete;
  LinearRun& operator=(const LinearRun&) = delete;

  void work(WorkerTeam& team, const os::Kernel* kernel) {
    read_x(team);
    const size_t total = outputs_ * row_bytes_;
    const size_t slots = total < 2 * kFewestBytes ? 1 : team.threads();
    const size_t bytes = std::clamp(total / (slots * kUnitsPerThread), kFewestBytes, kUnitBytes);
    const size_t wanted = std::min({bytes / std::max(row_bytes_, size_t{1}),
                                    kMostSums / std::max(padded_rows_, size_t{1}),
                                    round_up(outputs_, kernel_.outputs)});
    const size_t each = std::max(wanted / kernel_.outputs, size_t{1}) * kernel_.outputs;
    room_.sums.of(slots * padded_rows_ * each);
    room_.tables.of(slots * tables_each());
    std::vector<Outputs> units;
    for (size_t at = 0; at < outputs_; at += each) {
      units.push_back({at, std::min(outputs_, at + each)});
    }
    each_ = each;
    const auto multiply_all = [&] {
      if (slots > 1) return share_out(units, team, kernel);
      for (const Outputs& unit : units) multiply(unit, 0, copy_for(0));
    };
    if (padded_rows_ != tile_) return multiply_all();
    // Weights that are one row again and again come from a cache, which tells nothing.
    const size_t size = a_.weight.strides[0] == 0 ? 0 : outputs_ * width_;
    weight_choice_->run(size, kLeastLayerTried, [&](size_t way) {
      prefetch_ = kWeightPrefetches[way];
      multiply_all();
    });
  }

 private:
  // Arranges x, on all threads where that takes longer than to wake them.
  void read_x(WorkerTeam& team) {
    // Rows begin at a cache line, so that a load of a whole vector stays inside one.
    const size_t count = padded_rows_ * x_step_;
    float* numbers = room_.numbers.of(count + kLineFloats);
    const auto begin = reinterpret_cast<uintptr_t>(numbers);
    x_ = numbers + (round_up(begin, kLineFloats * sizeof(float)) - begin) / sizeof(float);
    if (padded_rows_ == tile_ || rows_ * width_ < kFewestShared) return read_rows(0, padded_rows_);
    std::atomic<size_t> next = 0;
    team.run([&](size_t) {
      for (size_t row; (row = next.fetch_add(tile_)) < padded_rows_;) read_rows(row, tile_);
    });
  }

  // Arranges whole tiles of rows. Those beyond the last row are zeros.
  void read_rows(size_t begin, size_t count) {
    float* to = x_ + begin * x_step_;
    std::fill_n(to, count * x_step_, 0.0f);
    LinearInput input;
    input.x_step = a_.x.strides[0] * static_cast<ptrdiff_t>(dtype_bytes(a_.x.dtype));
    input.x = a_.x.data + static_cast<ptrdiff_t>(begin) * input.x_step;
    input.dtype = a_.x.dtype;
    input.rows = std::min(count, rows_ - begin);
    input.width = width_;
    input.group = group();
    input.tile = tile_;
    input.to = to;
    input.to_step = x_step_;
    kernel_.prepare(input);
  }

  // Returns how many weights share scales, or 0 if all of an output do.
  size_t group() const {
    if (is_codes(a_)) return width_ / groups_;
    const bool of_groups = a_.scale.data != nullptr && a_.scale.shape[1] > 1;
    return of_groups ? width_ / static_cast<size_t>(a_.scale.shape[1]) : 0;
  }

  void read_factors(Isa isa) {
    const LinearKernel plain = linear_kernel(Dtype::kFloat32, isa);
    if (a_.bias.data != nullptr) bias_ = floats_of(a_.bias, plain);
    const float unit = a_.weight.dtype == Dtype::kFloat8E4m3 ? kE4m3Unit : 1;
    const bool of_outputs = a_.scale.data != nullptr && a_.scale.shape[1] == 1;
    if (unit == 1 && !of_outputs) return;
    factors_.assign(outputs_, unit);
    if (!of_outputs) return;
    const auto* scale = reinterpret_cast<const float*>(a_.scale.data);
    for (size_t i = 0; i < outputs_; ++i) {
      factors_[i] *= scale[static_cast<int64_t>(i) * a_.scale.strides[0]];
    }
  }

  size_t tables_each() const {
    if (!is_codes(a_)) return 0;
    return kMostTogether * groups_ * 2 + kLinearPad;
  }

  // Puts every unit into the queue of the node where its weights are.
  void share_out(const std::vector<Outputs>& units, WorkerTeam& team, const os::Kernel* kernel) {
    WorkQueues<Outputs> queues(team);
    const bool ask = kernel != nullptr && queues.size() > 1 && a_.near.empty();
    const size_t step = (units.size() + kMostAsked - 1) / kMostAsked;
    int home = -1;
    for (size_t i = 0; i < units.size(); ++i) {
      if (ask && i % step == 0) home = page_home(weights_of(copy_for(0), units[i]), *kernel);
      queues.give(home, units[i]);
    }
    std::atomic<size_t> taken = 0;
    team.run([&](size_t group) {
      const size_t slot = taken.fetch_add(1);
      const NearCopy copy = copy_for(group);
      bool fetched = false;
      if (padded_rows_ == tile_) {
        queues.drain(group, [&](const Outputs& unit) { multiply(unit, slot, copy); });
        return;
      }
      queues.drain(group, [&](const Outputs& unit, const Outputs* next) {
        multiply(unit, slot, copy, next, fetched);
        fetched = true;
      });
    });
  }

  NearCopy copy_for(size_t group) const {
    return a_.near.empty() ? NearCopy{a_.weight.data, a_.groups.data} : a_.near[group];
  }

  const std::byte* weights_of(const NearCopy& copy, const Outputs& unit) const {
    const auto element = static_cast<int64_t>(dtype_bytes(a_.weight.dtype));
    return copy.weight + static_cast<int64_t>(unit.begin) * a_.weight.strides[0] * element;
  }

  void multiply(const Outputs& unit, size_t slot, const NearCopy& copy,
                const Outputs* next = nullptr, bool fetched = false) {
    LinearPanel panel;
    panel.x = x_;
    panel.x_step = x_step_;
    panel.rows = padded_rows_;
    panel.tile = tile_;
    panel.weight = weights_of(copy, unit);
    panel.weight_step = static_cast<size_t>(a_.weight.strides[0]) * dtype_bytes(a_.weight.dtype);
    panel.outputs = unit.end - unit.begin;
    panel.width = width_;
    panel.block_outputs = block_outputs();
    add_scales(unit, slot, copy, panel);
    panel.sums = room_.sums.data.get() + slot * padded_rows_ * each_;
    panel.fetched = fetched;
    panel.prefetch = prefetch_;
    if (next != nullptr) {
      panel.next = weights_of(copy, *next);
      panel.next_outputs = next->end - next->begin;
    }
    if (width_ == 0) {
      std::fill_n(panel.sums, padded_rows_ * panel.outputs, 0.0f);
    } else {
      column_choice_->run(panel.outputs * width_, least_tried(), [&](size_t way) {
        panel.near_bytes = kNearBytes[way];
        kernel_.multiply(panel);
      });
    }
    finish(unit, panel.sums);
  }

  void add_scales(const Outputs& unit, size_t slot, const NearCopy& copy, LinearPanel& panel) {
    const auto first = static_cast<int64_t>(unit.begin);
    panel.group = group();
    if (is_codes(a_)) {
      panel.pairs = reinterpret_cast<const F16*>(copy.groups) + first * a_.groups.strides[0];
      panel.pairs_step = static_cast<size_t>(a_.groups.strides[0]);
      panel.form = a_.group_scales;
      panel.tables = room_.tables.data.get() + slot * tables_each();
    } else if (panel.group > 0) {
      panel.scale = reinterpret_cast<const float*>(a_.scale.data) + first * a_.scale.strides[0];
      panel.scale_step = static_cast<size_t>(a_.scale.strides[0]);
      panel.scale_group_step = static_cast<size_t>(a_.scale.strides[1]);
    }
  }

  // Later tiles find the weights of a block in the second cache, which also has rows of x, and the
  // next block while it is prefetched. So a block has a quarter of that cache, or half the outputs.
  size_t block_outputs() const {
    const bool fits =
        padded_rows_ == tile_ || kLinearOutputs * row_bytes_ * 4 <= second_cache_bytes();
    return fits ? kLinearOutputs : kLinearOutputs / 2;
  }

  // How many weights a unit has at least by which the columns of strips are chosen. With one tile
  // the choice is known: reading the weights takes longest, and x may not get in their way.
  size_t least_tried() const {
    return padded_rows_ == tile_ ? std::numeric_limits<size_t>::max() : kLeastTried;
  }

  void finish(const Outputs& unit, const float* sums) const {
    const size_t count = unit.end - unit.begin;
    const auto element = static_cast<int64_t>(dtype_bytes(a_.y.dtype));
    for (size_t row = 0; row < rows_; ++row) {
      LinearResult result;
      result.sums = sums + row * count;
      if (!factors_.empty()) result.factors = factors_.data() + unit.begin;
      if (!bias_.empty()) result.bias = bias_.data() + unit.begin;
      result.count = count;
      result.dtype = a_.y.dtype;
      result.y = a_.y.data +
                 (static_cast<int64_t>(row) * a_.y.strides[0] + static_cast<int64_t>(unit.begin)) *
                     element;
      kernel_.finish(result);
    }
  }

  const Linear& a_;
  const LinearKernel kernel_;
  const size_t width_;
  const size_t outputs_;
  const size_t rows_;
  const size_t groups_;  // of codes in a row
  const size_t x_step_;
  const size_t row_bytes_;
  size_t tile_ = 0;
  ColumnChoice* column_choice_ = nullptr;
  WeightChoice* weight_choice_ = nullptr;
  Prefetch prefetch_ = Prefetch::kNearest;
  size_t padded_rows_ = 0;
  size_t each_ = 0;  // how many outputs a unit has
  CallRoom& room_ = room_of_this_thread();
  float* x_ = nullptr;  // points into room_.numbers: [rows][x_step_]
  std::vector<float> bias_;
  std::vector<float> factors_;
};

// Returns how many rows are multiplied at a time, since a call keeps float32 copies of them, and
// their sums. Where half of the second cache is to have them they are fewer, but not so few that
// the weights, which are read once for each part, are waited for.
int64_t rows_at_a_time(const Linear& a, Isa isa) {
  constexpr size_t kMostNumbers = size_t{1} << 24;
  constexpr size_t kFewestCached = 64;
  constexpr size_t kTogether = 32;
  const auto width = static_cast<size_t>(a.x.shape[1]);
  const auto rows = static_cast<size_t>(a.x.shape[0]);
  const size_t row = round_up(width + 1, kLinearPad);
  size_t most = std::clamp(kMostNumbers / row, size_t{256}, size_t{1} << 15);
  if (const size_t bytes = linear_kernel(a, isa).x_bytes; bytes != 0) {
    most = std::min(most, std::max(second_cache_bytes() / 2 / (bytes * row), kFewestCached));
  }
  if (rows <= most) return a.x.shape[0];
  const size_t parts = (rows + most - 1) / most;
  return static_cast<int64_t>(round_up((rows + parts - 1) / parts, kTogether));
}

TensorView rows_of(const TensorView& view, int64_t begin, int64_t count) {
  TensorView part = view;
  part.data += begin * view.strides[0] * static_cast<int64_t>(dtype_bytes(view.dtype));
  part.shape[0] = count;
  return part;
}

}  // namespace

void run_linear(const Linear& linear, WorkerTeam& team, Isa isa, const os::Kernel* kernel) {
  check_linear(linear);
  if (linear.y.numel() == 0) return;
  const int64_t rows = linear.x.shape[0];
  const int64_t most = rows_at_a_time(linear, isa);
  if (rows <= most) {
    LinearRun run(linear, isa);
    return run.work(team, kernel);
  }
  Linear part = linear;
  for (int64_t begin = 0; begin < rows; begin += most) {
    part.x = rows_of(linear.x, begin, std::min(most, rows - begin));
    part.y = rows_of(linear.y, begin, std::min(most, rows - begin));
    LinearRun run(part, isa);
    run.work(team, kernel);
  }
}

}  // namespace cxl_offload::kernels
