// Linear layers: every instruction set, at the very edges of the memory it may read, by many
// threads; for the sanitizers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "core/float8.h"
#include "core/half.h"
#include "kernels/linear.h"
#include "page_edge.h"

namespace cxl_offload::kernels {
namespace {

TensorView view_of(const void* data, Dtype dtype, std::vector<int64_t> shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1];
  return make_view(reinterpret_cast<uintptr_t>(data), dtype, shape, strides);
}

struct Shape {
  int64_t rows, outputs, width;
};

// Weights of random bytes in a vector of exactly their size, so that a read beyond them is seen.
struct Layer {
  Layer(const Shape& shape, Dtype dtype, int64_t group = 32)
      : shape(shape), dtype(dtype), group(group) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    x.resize(static_cast<size_t>(shape.rows * shape.width));
    for (float& value : x) value = normal(random);
    y.resize(static_cast<size_t>(shape.rows * shape.outputs));
    bias.resize(static_cast<size_t>(shape.outputs));
    for (float& value : bias) value = normal(random);
    const auto count = static_cast<size_t>(shape.outputs * shape.width);
    weight.resize(dtype == Dtype::kUint8 ? count / 2 : count * dtype_bytes(dtype));
    worth.resize(count);
    for (size_t i = 0; i < count; ++i) worth[i] = put(i, normal(random));
    if (dtype != Dtype::kUint8) return;
    const auto each = static_cast<size_t>(group);
    groups.resize(count / each * 2);
    for (F16& value : groups) value = to_f16(std::abs(normal(random)) + 0.5f);
    for (size_t i = 0; i < count; ++i) {
      const auto byte = std::to_integer<unsigned>(weight[i / 2]);
      const auto code = static_cast<float>(i % 2 == 0 ? byte >> 4 : byte & 15);
      worth[i] = code * to_float(groups[i / each * 2 + 1]) + to_float(groups[i / each * 2]);
    }
  }

  // Stores a weight near `value` and tells what it is worth.
  double put(size_t at, float value) {
    switch (dtype) {
      case Dtype::kFloat32:
        reinterpret_cast<float*>(weight.data())[at] = value;
        return value;
      case Dtype::kBfloat16:
        return to_float(reinterpret_cast<Bf16*>(weight.data())[at] = to_bf16(value));
      case Dtype::kFloat16:
        return to_float(reinterpret_cast<F16*>(weight.data())[at] = to_f16(value));
      case Dtype::kFloat8E4m3: {
        const auto bits = static_cast<uint8_t>(static_cast<int>(value * 50) & 0xff);
        weight[at] = std::byte(bits % 128 == 127 ? bits - 1 : bits);
        return to_float(E4m3{std::to_integer<uint8_t>(weight[at])});
      }
      case Dtype::kInt8: {
        const auto whole = static_cast<int8_t>(static_cast<int>(value * 50));
        weight[at] = std::byte(whole);
        return whole;
      }
      case Dtype::kUint8:
        weight[at / 2] = std::byte(static_cast<int>(value * 50) & 0xff);
        return 0;
      case Dtype::kFloat8E5m2:
        break;
    }
    throw std::logic_error("no such weights");
  }

  Linear linear() {
    const bool codes = dtype == Dtype::kUint8;
    Linear a;
    a.x = view_of(x.data(), Dtype::kFloat32, {shape.rows, shape.width});
    a.y = view_of(y.data(), Dtype::kFloat32, {shape.rows, shape.outputs});
    a.bias = view_of(bias.data(), Dtype::kFloat32, {shape.outputs});
    a.weight = view_of(weight.data(), dtype, {shape.outputs, shape.width / (codes ? 2 : 1)});
    if (codes) {
      a.groups = view_of(groups.data(), Dtype::kFloat16, {shape.outputs, shape.width / group, 2});
    }
    return a;
  }

  // The greatest difference from the sum in double, over what the products add up to in size.
  double error() const {
    double most = 0;
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t output = 0; output < shape.outputs; ++output) {
        double sum = bias[static_cast<size_t>(output)], size = std::abs(sum);
        for (int64_t i = 0; i < shape.width; ++i) {
          const double product = x[static_cast<size_t>(row * shape.width + i)] *
                                 worth[static_cast<size_t>(output * shape.width + i)];
          sum += product;
          size += std::abs(product);
        }
        const double found = y[static_cast<size_t>(row * shape.outputs + output)];
        most = std::max(most, std::abs(found - sum) / size);
      }
    }
    return most;
  }

  Shape shape;
  Dtype dtype;
  int64_t group;  // codes that share scales
  std::vector<std::byte> weight;
  std::vector<F16> groups;
  std::vector<float> x, y, bias;
  std::vector<double> worth;
};

constexpr Dtype kWeights[] = {Dtype::kFloat32,    Dtype::kBfloat16, Dtype::kFloat16,
                              Dtype::kFloat8E4m3, Dtype::kInt8,     Dtype::kUint8};

TEST(every_instruction_set_type_and_team_follows_the_sum) {
  for (size_t threads : {size_t{1}, size_t{3}}) {
    WorkerTeam team({{-1, threads, {}}});
    for (Isa isa : supported_isas()) {
      for (Dtype dtype : kWeights) {
        for (const Shape& shape : {Shape{1, 9, 64}, {2, 50, 160}, {5, 7, 4128}, {17, 49, 96}}) {
          Layer layer(shape, dtype);
          run_linear(layer.linear(), team, isa);
          CHECK(layer.error() < 3e-6);
        }
      }
    }
  }
}

// How 4-bit codes are multiplied.
struct CodesWay {
  Isa isa;
  bool integers;
};

std::vector<CodesWay> ways_of_codes() {
  std::vector<CodesWay> ways;
  for (Isa isa : supported_isas()) ways.push_back({isa, false});
  if (has_integer_codes()) ways.push_back({Isa::kAvx512, true});
  return ways;
}

TEST(groups_of_codes_of_any_size_follow_the_sum_in_any_batch) {
  WorkerTeam team({{-1, 2, {}}});
  for (const auto& [isa, integers] : ways_of_codes()) {
    for (int64_t group : {32, 64, 96, 128, 160, 256, 4128}) {
      const int64_t width = group * (4200 / group + 1);  // more than are summed at a time
      Layer layer({7, 50, width}, Dtype::kUint8, group);
      Linear all = layer.linear();
      all.integers = integers;
      run_linear(all, team, isa);
      CHECK(layer.error() < 3e-6);
      for (int64_t row = 0; row < 7; ++row) {
        std::vector<float> y(50);
        Linear one = all;
        one.x = view_of(layer.x.data() + row * width, Dtype::kFloat32, {1, width});
        one.y = view_of(y.data(), Dtype::kFloat32, {1, 50});
        run_linear(one, team, isa);
        CHECK(std::equal(y.begin(), y.end(), layer.y.begin() + row * 50));
      }
    }
  }
}

TEST(weights_are_read_to_their_edge_and_no_further) {
  WorkerTeam team({{-1, 2, {}}});
  for (Isa isa : supported_isas()) {
    for (Dtype dtype : kWeights) {
      const bool codes = dtype == Dtype::kUint8;  // rows of whole groups
      for (int64_t width : codes ? std::vector<int64_t>{32, 96, 128, 160, 4128}
                                 : std::vector<int64_t>{1, 15, 17, 33, 100, 129}) {
        Layer layer({3, 5, width}, dtype);
        const PageEdge weight(layer.weight.data(), layer.weight.size());
        Linear a = layer.linear();
        a.weight.data = weight.data();
        run_linear(a, team, isa);
        CHECK(layer.error() < 3e-6);
      }
    }
  }
}

TEST(codes_are_read_to_their_edge_in_any_way) {
  WorkerTeam team({{-1, 2, {}}});
  for (const auto& [isa, integers] : ways_of_codes()) {
    for (int64_t width : {128, 384, 4224}) {
      Layer layer({3, 5, width}, Dtype::kUint8, 64);
      const PageEdge weight(layer.weight.data(), layer.weight.size());
      Linear a = layer.linear();
      a.weight.data = weight.data();
      a.integers = integers;
      run_linear(a, team, isa);
      CHECK(layer.error() < 3e-6);
    }
  }
}

TEST(work_of_many_units_is_done_once_by_any_team) {
  Layer one({2, 3000, 130}, Dtype::kFloat16), many({2, 3000, 130}, Dtype::kFloat16);
  WorkerTeam alone({{-1, 1, {}}}), team({{-1, 5, {}}});
  run_linear(one.linear(), alone, best_isa());
  run_linear(many.linear(), team, best_isa());
  CHECK(one.error() < 3e-6);
  CHECK(std::memcmp(one.y.data(), many.y.data(), one.y.size() * sizeof(float)) == 0);
}

// The first calls with one tile prefetch weights into the first cache, into the second, and not at
// all, in turns.
TEST(a_row_has_the_same_bits_however_its_weights_are_prefetched) {
  constexpr int64_t kOutputs = 528, kWidth = 1536;
  WorkerTeam alone({{-1, 1, {}}});
  for (Dtype dtype : kWeights) {
    for (int64_t rows : {1, 2, 4}) {
      Layer layer({rows, kOutputs, kWidth}, dtype);
      std::vector<Bf16> x(layer.x.size());
      std::ranges::transform(layer.x, x.begin(), [](float value) { return to_bf16(value); });
      Linear a = layer.linear();
      if (dtype != Dtype::kFloat16) a.x = view_of(x.data(), Dtype::kBfloat16, {rows, kWidth});
      run_linear(a, alone, best_isa());
      const std::vector<float> first = layer.y;
      for (int call = 1; call < 4; ++call) {
        std::ranges::fill(layer.y, 0.0f);
        run_linear(a, alone, best_isa());
        CHECK(layer.y == first);
      }
    }
  }
}

// The first calls with several tiles try strips of few and of many columns in turns. With an odd
// number of units, each unit is multiplied in both ways.
TEST(a_row_has_the_same_bits_however_its_columns_are_cut) {
  constexpr int64_t kRows = 17, kOutputs = 528, kWidth = 1500;
  WorkerTeam alone({{-1, 1, {}}}), team({{-1, 3, {}}});
  for (Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat32}) {
    Layer layer({kRows, kOutputs, kWidth}, dtype);
    std::vector<Bf16> x(layer.x.size());
    std::ranges::transform(layer.x, x.begin(), [](float value) { return to_bf16(value); });
    Linear all = layer.linear();
    all.x = view_of(x.data(), Dtype::kBfloat16, {kRows, kWidth});
    std::vector<float> rows(layer.y.size());
    for (int64_t row = 0; row < kRows; ++row) {
      Linear one = all;
      one.x = view_of(x.data() + row * kWidth, Dtype::kBfloat16, {1, kWidth});
      one.y = view_of(rows.data() + row * kOutputs, Dtype::kFloat32, {1, kOutputs});
      run_linear(one, alone, best_isa());
    }
    for (int call = 0; call < 8; ++call) {
      std::ranges::fill(layer.y, 0.0f);
      run_linear(all, call % 4 == 3 ? team : alone, best_isa());
      CHECK(layer.y == rows);
    }
  }
}

TEST(products_of_registers_take_their_time_in_every_instruction_set) {
  WorkerTeam team({{-1, 2, {}}});
  for (Isa isa : supported_isas()) {
    for (Dtype dtype : kWeights) {
      Layer layer({2, 4, 128}, dtype);
      std::vector<Bf16> x(256);
      Linear given = layer.linear();
      for (Dtype of_x : {Dtype::kFloat32, Dtype::kBfloat16}) {
        if (of_x == Dtype::kBfloat16) given.x = view_of(x.data(), of_x, {2, 128});
        for (auto products : {Bf16Products::kNone, Bf16Products::kVectors}) {
          given.bf16_products = products;
          const double rate = linear_products_per_s(given, team, isa);
          // The plain loops are an oracle, and nobody asks how fast. Two threads whose loops a
          // compiler had removed would seem to add 4e12 products a second.
          CHECK(isa == Isa::kScalar ? rate == 0 : rate > 1e7 && rate < 1.5e12);
        }
      }
    }
  }
  CHECK_EQ(has_fast_bf16_products(), has_fast_bf16_products());
  CHECK(has_bf16_products() || !has_fast_bf16_products());
}

TEST(each_group_reads_the_copy_near_it) {
  for (Dtype dtype : {Dtype::kFloat16, Dtype::kUint8}) {
    Layer first({2, 3000, 128}, dtype), second({2, 3000, 128}, dtype);
    WorkerTeam alone({{-1, 1, {}}}), near({{7, 1, {}}}), both({{0, 1, {}}, {1, 1, {}}});
    run_linear(first.linear(), alone, best_isa());
    for (std::byte& each : second.weight) each ^= std::byte{0x11};
    run_linear(second.linear(), alone, best_isa());
    Layer read({2, 3000, 128}, dtype);
    Linear a = read.linear();
    a.near = {{second.weight.data(), reinterpret_cast<std::byte*>(second.groups.data())}};
    run_linear(a, near, best_isa());
    CHECK(read.y == second.y);
    a.near.insert(a.near.begin(), {a.weight.data, a.groups.data});
    std::ranges::fill(read.y, 0.0f);
    run_linear(a, both, best_isa());
    for (size_t i = 0; i < read.y.size(); ++i) {
      CHECK(read.y[i] == first.y[i] || read.y[i] == second.y[i]);
    }
  }
}

TEST(nothing_is_written_when_shapes_do_not_fit) {
  WorkerTeam team({{-1, 1, {}}});
  Layer layer({2, 3, 64}, Dtype::kFloat16);
  Linear a = layer.linear();
  a.y.shape[1] = 4;
  CHECK_THROWS(InvalidArgument, run_linear(a, team, best_isa()));
  for (float value : layer.y) CHECK_EQ(value, 0);
}

}  // namespace
}  // namespace cxl_offload::kernels
