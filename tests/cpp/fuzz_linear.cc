// What libFuzzer drives, and test_fuzz_linear.cc replays: linear layers over weights of any type,
// strides, offsets, scales, groups, biases and teams, against the formula in double.
#include <cmath>
#include <optional>
#include <vector>

#include "core/error.h"
#include "fuzz_arrays.h"
#include "fuzz_input.h"
#include "kernels/linear.h"

namespace cxl_offload::kernels {
namespace {

const std::vector<Dtype> kWritten = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};
const std::vector<Dtype> kWeights = {Dtype::kFloat16,    Dtype::kBfloat16, Dtype::kFloat32,
                                     Dtype::kFloat8E4m3, Dtype::kInt8,     Dtype::kUint8};
constexpr int64_t kMostProducts = 4'000'000;
constexpr float kUnwritten = -1234;

// Rows of a matrix with gaps between them, in exactly the memory that they span.
struct Rows {
  Rows(Input& input, Dtype dtype, int64_t rows, int64_t width)
      : Rows{dtype, rows, width, gap_of(input), input.below(40)} {}
  Rows(Dtype dtype, int64_t rows, int64_t width, int64_t gap, size_t offset) {
    const int64_t step = width + gap;
    const auto count = static_cast<size_t>(rows > 0 ? (rows - 1) * step + width : 0);
    array.emplace(dtype, count, offset);
    view = make_view(reinterpret_cast<uintptr_t>(array->data()), dtype, {rows, width}, {step, 1});
  }
  static int64_t gap_of(Input& input) {
    return input.below(3) == 0 ? static_cast<int64_t>(input.below(40)) : 0;
  }
  double at(int64_t row, int64_t column) const {
    return number_at(view.data, view.dtype, row * view.strides[0] + column);
  }

  std::optional<GuardedArray> array;
  TensorView view;
};

// One call with all that it reads.
struct Case {
  explicit Case(Input& input) : numbers(input.byte()) {
    dtype = input.any_of(kWeights);
    codes = dtype == Dtype::kUint8;
    choose_shape(input);
    x.emplace(input, input.any_of(kWritten), rows, width);
    x->array->fill(input.one_in(16) ? Filling::kTiny : Filling::kUnit, false, numbers);
    weight.emplace(input, dtype, outputs, codes ? width / 2 : width);
    fill_weight(input);
    if (codes) choose_groups(input);
    if (!codes) choose_scale(input);
    if (input.below(2) == 0) {
      bias.emplace(input.any_of(kWritten), static_cast<size_t>(outputs), input.below(40));
      bias->fill(Filling::kUnit, false, numbers);
    }
    y.emplace(input, input.any_of(kWritten), rows, outputs);
  }

  void choose_shape(Input& input) {
    rows = 1 + static_cast<int64_t>(input.one_in(4) ? input.below(70) : input.below(10));
    outputs = static_cast<int64_t>(input.one_in(8) ? input.byte() * 4 : input.below(60));
    const size_t kind = input.below(8);
    const auto more = static_cast<int64_t>(input.byte());
    if (codes) {
      group = 32 * (1 + static_cast<int64_t>(input.one_in(4) ? input.below(5) : input.below(2)));
      groups = kind == 7 ? 4096 / group + more % 70 : 1 + more % 9;
      width = group * groups;
    } else {
      width = kind < 5 ? more % 140 : kind == 5 ? 3 * more : kind == 6 ? 4000 + more : 8100 + more;
    }
    const int64_t most = kMostProducts / std::max<int64_t>(rows * width, 1);
    outputs = std::min(outputs, most);
  }

  void fill_weight(Input& input) {
    const bool any_bits = codes || dtype == Dtype::kInt8;
    weight->array->fill(any_bits ? Filling::kAnyBits : Filling::kUnit, false, numbers);
    if (dtype != Dtype::kFloat8E4m3) return;
    const bool with_nan = input.one_in(4);
    for (size_t i = 0; i < weight->array->count(); ++i) {
      const auto bits = static_cast<uint8_t>(numbers.next() >> 56);
      const bool nan = (bits & 0x7f) == 0x7f && (!with_nan || numbers.next() % 16 > 0);
      weight->array->data()[i] = std::byte(nan ? bits ^ 1 : bits);
    }
  }

  void choose_groups(Input& input) {
    form = input.any_of<GroupScales>(
        {GroupScales::kLowStep, GroupScales::kInverseLow, GroupScales::kZeroStep});
    pairs.emplace(input, Dtype::kFloat16, outputs, 2 * groups);
    pairs->array->fill(Filling::kUnit, true, numbers);
    const auto second = form == GroupScales::kInverseLow ? 0 : 1;  // which must not be near zero
    for (int64_t output = 0; output < outputs; ++output) {
      for (int64_t i = 0; i < groups; ++i) {
        pairs->array->put(static_cast<size_t>(output * pairs->view.strides[0] + 2 * i + second),
                          0.25f + std::abs(numbers.unit()));
      }
    }
  }

  void choose_scale(Input& input) {
    const size_t kind = input.below(4);
    if (kind == 0) return;
    scales = 1;
    if (kind == 1 && dtype_bytes(dtype) == 1 && width > 0) {
      scales = 1 + static_cast<int64_t>(input.below(8));
      while (width % scales != 0) --scales;
    }
    const bool one = kind == 3;  // for all outputs, as expand() makes it
    const bool down = input.below(2) == 0;
    scale_step[0] = one ? 0 : down ? 1 : scales;
    scale_step[1] = down ? std::max<int64_t>(outputs, 1) : 1;
    const int64_t last = (std::max<int64_t>(outputs, 1) - 1) * scale_step[0];
    scale.emplace(Dtype::kFloat32, static_cast<size_t>(last + (scales - 1) * scale_step[1] + 1),
                  input.below(40));
    scale->fill(Filling::kUnit, false, numbers);
  }

  Linear linear() {
    Linear a;
    a.x = x->view;
    a.weight = weight->view;
    a.y = y->view;
    if (bias) a.bias = bias->view();
    if (scale) {
      a.scale = make_view(reinterpret_cast<uintptr_t>(scale->data()), Dtype::kFloat32,
                          {outputs, scales}, {scale_step[0], scale_step[1]});
    }
    if (codes) {
      a.groups = pairs->view;
      a.groups.shape = {outputs, groups, 2};
      a.groups.strides = {pairs->view.strides[0], 2, 1};
      a.group_scales = form;
    }
    return a;
  }

  // A weight, and how large what it is computed from may be.
  double worth(int64_t output, int64_t column, double& size) const {
    if (!codes) {
      double number = weight->at(output, column);
      if (scale) {
        const int64_t of = column / (width / scales);
        number *=
            number_at(scale->data(), Dtype::kFloat32, output * scale_step[0] + of * scale_step[1]);
      }
      size = std::abs(number);
      return number;
    }
    const auto byte =
        std::to_integer<int>(weight->view.data[output * weight->view.strides[0] + column / 2]);
    const int code = column % 2 == 0 ? byte >> 4 : byte & 15;
    const double first = pairs->at(output, column / group * 2);
    const double second = pairs->at(output, column / group * 2 + 1);
    const double step = form == GroupScales::kInverseLow ? 1 / first : second;
    const double low = form == GroupScales::kLowStep      ? first
                       : form == GroupScales::kInverseLow ? second
                                                          : -first * second;
    size = 32 * step + std::abs(low);
    return code * step + low;
  }

  Numbers numbers;
  Dtype dtype = Dtype::kFloat32;
  bool codes = false;
  int64_t rows = 0, outputs = 0, width = 0, group = 0, groups = 0, scales = 1;
  int64_t scale_step[2] = {0, 0};
  GroupScales form = GroupScales::kLowStep;
  std::optional<Rows> x, weight, pairs, y;
  std::optional<GuardedArray> bias, scale;
};

// The formula, and how far from it float arithmetic may end.
void check_number(const Case& c, int64_t row, int64_t output) {
  double sum = c.bias ? number_at(c.bias->data(), c.bias->dtype(), output) : 0;
  double sizes = std::abs(sum);
  for (int64_t column = 0; column < c.width; ++column) {
    double size = 0;
    const double number = c.x->at(row, column);
    sum += number * c.worth(output, column, size);
    sizes += std::abs(number) * size;
  }
  const double got = c.y->at(row, output);
  const Dtype written = c.y->view.dtype;
  if (std::isnan(sum)) return require(std::isnan(got), "a NaN did not spread");
  if (written == Dtype::kFloat16 && std::abs(sum) > 60000) return;  // near or beyond its infinity
  const double rounding = written == Dtype::kFloat32    ? 1e-6
                          : written == Dtype::kBfloat16 ? 4e-3
                                                        : 5e-4;
  const double off = std::abs(sum) * rounding + sizes * 4e-6 + 1e-7;
  require(std::abs(got - sum) <= off, "output " + std::to_string(output) + " of row " +
                                          std::to_string(row) + " is " + std::to_string(got) +
                                          ", not " + std::to_string(sum));
}

void check_some(Case& c) {
  const int64_t count = c.rows * c.outputs;
  const int64_t most = std::max<int64_t>(1, 200'000 / std::max<int64_t>(c.width, 1));
  const bool all = count <= most;
  for (int64_t i = 0; i < std::min(count, most); ++i) {
    const int64_t at = all ? i : static_cast<int64_t>(c.numbers.next() >> 1) % count;
    check_number(c, at / c.outputs, at % c.outputs);
  }
}

void check_gaps(const Case& c) {
  require(c.y->array->guard_is_whole(), "bytes before the result were written");
  const int64_t step = c.y->view.strides[0];
  for (int64_t row = 0; row + 1 < c.rows; ++row) {
    for (int64_t at = c.outputs; at < step; ++at) {
      const double found = number_at(c.y->view.data, c.y->view.dtype, row * step + at);
      require(std::abs(found - kUnwritten) < 8, "a gap between rows was written");
    }
  }
}

// Some rows alone, in another place, must come out with the same bits.
void check_rows_alone(Input& input, Case& c, Linear a, Isa isa) {
  if (c.outputs == 0) return;
  const auto first = static_cast<int64_t>(input.below(static_cast<size_t>(c.rows)));
  const int64_t count =
      std::min(c.rows - first, 1 + static_cast<int64_t>(input.one_in(2) ? input.below(8) : 0));
  const auto element = static_cast<int64_t>(dtype_bytes(a.y.dtype));
  const auto x_element = static_cast<int64_t>(dtype_bytes(a.x.dtype));
  Rows alone(a.y.dtype, count, c.outputs, 0, input.below(40));
  a.x.data += first * a.x.strides[0] * x_element;
  a.x.shape[0] = count;
  a.y = alone.view;
  run_linear(a, any_team(input), isa);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t output = 0; output < c.outputs; ++output) {
      const std::byte* beside =
          c.y->view.data + ((first + row) * c.y->view.strides[0] + output) * element;
      const std::byte* own = alone.view.data + (row * c.outputs + output) * element;
      const bool nan =
          std::isnan(alone.at(row, output)) && std::isnan(c.y->at(first + row, output));
      require(nan || std::memcmp(beside, own, static_cast<size_t>(element)) == 0,
              "a row has other bits beside other rows");
    }
  }
}

// Makes the call unfit.
void spoil(Input& input, Linear& a) {
  const size_t how = input.below(7);
  if (how == 0) a.x.shape[1] += 1;
  if (how == 1) a.y.shape[0] += 1;
  if (how == 2) a.y.shape[1] += 1;
  if (how == 3) a.x.dtype = Dtype::kFloat8E4m3;
  if (how == 4) a.weight.dtype = Dtype::kFloat8E5m2;
  if (how == 5) a.x.shape.pop_back();
  if (how == 6) a.bias = a.x;
}

void fuzz_linear(Input& input) {
  const FlushedDenormals mode(input.one_in(16));
  const Isa isa = input.any_of(supported_isas());
  WorkerTeam& team = any_team(input);
  const bool unfit = input.one_in(16);
  Case c(input);
  Linear a = c.linear();
  a.bf16_products =
      input.any_of<Bf16Products>({Bf16Products::kNone, Bf16Products::kVectors, Bf16Products::kTiles,
                                  Bf16Products::kBest, Bf16Products::kWidened});
  a.integers = input.one_in(2);
  if (unfit) {
    spoil(input, a);
    bool refused = false;
    try {
      run_linear(a, team, isa);
    } catch (const InvalidArgument&) {
      refused = true;
    }
    return require(refused, "a call that does not fit was run");
  }
  for (size_t i = 0; i < c.y->array->count(); ++i) c.y->array->put(i, kUnwritten);
  run_linear(a, team, isa);
  check_some(c);
  check_gaps(c);
  const GuardedArray first(*c.y->array);
  run_linear(a, team_of({1}), isa);
  require(first.same_bytes(*c.y->array), "another result with one thread");
  check_rows_alone(input, c, a, isa);
}

}  // namespace
}  // namespace cxl_offload::kernels

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  cxl_offload::Input input(data, size);
  cxl_offload::kernels::fuzz_linear(input);
  return 0;
}
