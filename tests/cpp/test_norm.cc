// Norms of rows: every instruction set and type, at the very edges of the memory that it may read
// and write, by several threads; for the sanitizers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "core/half.h"
#include "kernels/norm.h"
#include "page_edge.h"

namespace cxl_offload::kernels {
namespace {

constexpr Dtype kTypes[] = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};

float get(const std::byte* data, Dtype dtype, size_t at) {
  if (dtype == Dtype::kFloat32) return reinterpret_cast<const float*>(data)[at];
  if (dtype == Dtype::kBfloat16) return to_float(reinterpret_cast<const Bf16*>(data)[at]);
  return to_float(reinterpret_cast<const F16*>(data)[at]);
}

std::vector<std::byte> drawn(size_t count, Dtype dtype, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(count * dtype_bytes(dtype));
  for (size_t i = 0; i < count; ++i) {
    const float value = normal(random);
    if (dtype == Dtype::kFloat32) reinterpret_cast<float*>(bytes.data())[i] = value;
    if (dtype == Dtype::kBfloat16) reinterpret_cast<Bf16*>(bytes.data())[i] = to_bf16(value);
    if (dtype == Dtype::kFloat16) reinterpret_cast<F16*>(bytes.data())[i] = to_f16(value);
  }
  return bytes;
}

TensorView view_of(const std::byte* data, Dtype dtype, std::vector<int64_t> shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  if (shape.size() == 2) strides[0] = shape[1];
  return make_view(reinterpret_cast<uintptr_t>(data), dtype, shape, strides);
}

// Vectors of exactly their size, so that what is read or written beyond them is seen.
struct Rows {
  Rows(int64_t rows, int64_t width, Dtype dtype)
      : rows(rows),
        width(width),
        dtype(dtype),
        x(drawn(static_cast<size_t>(rows * width), dtype, 1)),
        weight(drawn(static_cast<size_t>(width), dtype, 2)),
        y(x.size()) {}

  Norm norm() const {
    return {view_of(x.data(), dtype, {rows, width}), view_of(weight.data(), dtype, {width}),
            view_of(y.data(), dtype, {rows, width}), 1e-6f};
  }

  // The greatest difference from the norm in double, over its size.
  double error() const {
    double most = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const auto first = static_cast<size_t>(row * width);
      const auto count = static_cast<size_t>(width);
      double sum = 0;
      for (size_t i = 0; i < count; ++i) sum += std::pow(get(x.data(), dtype, first + i), 2.0);
      const double factor = 1 / std::sqrt(sum / static_cast<double>(width) + 1e-6);
      for (size_t i = 0; i < count; ++i) {
        const double wanted =
            get(x.data(), dtype, first + i) * factor * get(weight.data(), dtype, i);
        const double found = get(y.data(), dtype, first + i);
        most = std::max(most, std::abs(found - wanted) / (std::abs(wanted) + 1e-4));
      }
    }
    return most;
  }

  // What two roundings may be off.
  double room() const {
    if (dtype == Dtype::kFloat32) return 1e-6;
    return dtype == Dtype::kBfloat16 ? 1.01 / 128 : 1.01 / 1024;
  }

  int64_t rows, width;
  Dtype dtype;
  std::vector<std::byte> x, weight, y;
};

TEST(norms_of_every_instruction_set_are_those_in_double) {
  WorkerTeam team({{-1, 2, {}}});
  for (Isa isa : supported_isas()) {
    for (Dtype dtype : kTypes) {
      for (int64_t width : {1, 7, 16, 31, 64, 129, 4097}) {
        Rows rows(3, width, dtype);
        run_norm(rows.norm(), team, isa);
        CHECK(rows.error() < rows.room());
      }
    }
  }
}

TEST(rows_are_read_to_their_edge_and_no_further) {
  WorkerTeam team({{-1, 1, {}}});
  for (Isa isa : supported_isas()) {
    for (Dtype dtype : kTypes) {
      for (int64_t width : {1, 5, 17, 33, 100}) {
        Rows rows(2, width, dtype);
        const PageEdge x(rows.x.data(), rows.x.size()), w(rows.weight.data(), rows.weight.size());
        Norm a = rows.norm();
        a.x.data = x.data();
        a.weight.data = w.data();
        run_norm(a, team, isa);
        CHECK(rows.error() < rows.room());
      }
    }
  }
}

TEST(many_rows_are_done_once_by_any_team) {
  for (Isa isa : supported_isas()) {
    Rows one(700, 130, Dtype::kBfloat16), many(700, 130, Dtype::kBfloat16);
    WorkerTeam alone({{-1, 1, {}}}), team({{-1, 5, {}}});
    run_norm(one.norm(), alone, isa);
    run_norm(many.norm(), team, isa);
    CHECK(one.error() < one.room());
    CHECK(one.y == many.y);
    Norm in_place = many.norm();
    in_place.y.data = in_place.x.data;
    run_norm(in_place, team, isa);
    CHECK(many.x == one.y);
  }
}

TEST(rows_may_lie_any_distance_apart) {
  WorkerTeam team({{-1, 1, {}}});
  for (Isa isa : supported_isas()) {
    Rows rows(4, 50, Dtype::kFloat16);
    Norm a = rows.norm();
    run_norm(a, team, isa);
    const std::vector<std::byte> whole = rows.y;
    a.x.shape = a.y.shape = {2, 50};
    a.x.strides[0] = 100;
    run_norm(a, team, isa);
    CHECK(std::equal(whole.begin(), whole.begin() + 100, rows.y.begin()));
    CHECK(std::equal(whole.begin() + 200, whole.begin() + 300, rows.y.begin() + 100));
  }
}

TEST(nothing_is_written_when_shapes_or_types_do_not_fit) {
  WorkerTeam team({{-1, 1, {}}});
  Rows rows(2, 64, Dtype::kFloat32);
  std::vector<Norm> bad(6, rows.norm());
  bad[0].weight.shape[0] = 63;
  bad[1].y.shape[1] = 63;
  bad[2].weight.dtype = Dtype::kFloat16;
  bad[3].x.dtype = bad[3].y.dtype = bad[3].weight.dtype = Dtype::kInt8;
  bad[4].x.strides[1] = 2;
  bad[5].y.strides[0] = 65;
  for (const Norm& a : bad) CHECK_THROWS(InvalidArgument, run_norm(a, team, best_isa()));
  for (std::byte each : rows.y) CHECK(each == std::byte{0});
}

}  // namespace
}  // namespace cxl_offload::kernels
