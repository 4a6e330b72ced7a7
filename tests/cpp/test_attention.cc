// Decode attention: every instruction set, at the very edges of the memory it may read, by many
// threads; for the sanitizers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "core/half.h"
#include "kernels/attention.h"
#include "kernels/attention_queues.h"
#include "memory/numa_region.h"
#include "page_edge.h"
#include "simulated_ground.h"

namespace cxl_offload::kernels {
namespace {

struct Shape {
  int64_t batch, heads, kv_heads, seq, dim;
};

TensorView view_of(const void* data, Dtype dtype, std::vector<int64_t> shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1];
  return make_view(reinterpret_cast<uintptr_t>(data), dtype, shape, strides);
}

// Caches of exactly their size, so that a read beyond them is seen.
struct Case {
  explicit Case(const Shape& shape) : shape(shape) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(shape.batch * shape.heads * shape.dim));
    out.resize(q.size());
    sums.resize(static_cast<size_t>(shape.batch * shape.heads));
    k.resize(static_cast<size_t>(shape.batch * shape.kv_heads * shape.seq * shape.dim));
    v.resize(k.size());
    for (float& value : q) value = normal(random);
    for (F16& value : k) value = to_f16(normal(random));
    for (F16& value : v) value = to_f16(normal(random));
  }

  Attention attention() {
    const auto& [batch, heads, kv_heads, seq, dim] = shape;
    Attention a;
    a.q = view_of(q.data(), Dtype::kFloat32, {batch, heads, dim});
    a.out = view_of(out.data(), Dtype::kFloat32, {batch, heads, dim});
    a.k = view_of(k.data(), Dtype::kFloat16, {batch, kv_heads, seq, dim});
    a.v = view_of(v.data(), Dtype::kFloat16, {batch, kv_heads, seq, dim});
    a.scale = 0.25;
    a.log_sum_exp = sums.data();
    return a;
  }

  // The greatest difference from the formula in double.
  double error(int64_t length) const {
    const auto& [batch, heads, kv_heads, seq, dim] = shape;
    double most = 0;
    for (int64_t query = 0; query < batch * heads; ++query) {
      const int64_t head = query / heads * kv_heads + query % heads / (heads / kv_heads);
      std::vector<double> sum(static_cast<size_t>(dim));
      double total = 0;
      for (int64_t row = 0; row < length; ++row) {
        const auto at = static_cast<size_t>((head * seq + row) * dim);
        double score = 0;
        for (size_t i = 0; i < sum.size(); ++i) {
          score += 0.25 * q[static_cast<size_t>(query * dim) + i] * to_float(k[at + i]);
        }
        const double weight = std::exp(score);
        total += weight;
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += weight * to_float(v[at + i]);
      }
      for (size_t i = 0; i < sum.size(); ++i) {
        const double off = out[static_cast<size_t>(query * dim) + i] - sum[i] / total;
        most = std::max(most, std::abs(off));
      }
      most = std::max(most, std::abs(sums[static_cast<size_t>(query)] - std::log(total)));
    }
    return most;
  }

  Shape shape;
  std::vector<float> q, out, sums;
  std::vector<F16> k, v;
};

TEST(every_instruction_set_and_team_follows_the_formula) {
  for (size_t threads : {size_t{1}, size_t{4}}) {
    WorkerTeam team({{-1, threads, {}}});
    for (Isa isa : supported_isas()) {
      for (int64_t dim : {1, 15, 16, 17, 64, 129, 200}) {
        for (int64_t seq : {1, 5, 300, 1030}) {
          Case c({2, 4, 2, seq, dim});
          run_attention(c.attention(), team, isa);
          CHECK(c.error(seq) < 2e-5);
        }
      }
    }
  }
}

// Caches of exactly their size, whose last load must not read beyond them.
TEST(eight_bit_caches_are_read_to_their_edge_and_no_further) {
  WorkerTeam team({{-1, 2, {}}});
  for (Isa isa : supported_isas()) {
    for (int64_t dim : {1, 15, 16, 33, 129}) {
      Case c({1, 2, 1, 5, dim});
      const std::vector<uint8_t> ones(static_cast<size_t>(5 * dim), 0x38);  // 1 in E4M3
      const PageEdge rows(ones.data(), ones.size());
      Attention a = c.attention();
      a.k = a.v = view_of(rows.data(), Dtype::kFloat8E4m3, {1, 1, 5, dim});
      a.v_scales = {3};
      run_attention(a, team, isa);
      for (float value : c.out) CHECK(std::abs(value - 3) < 1e-5);
    }
  }
}

TEST(rows_of_bfloat16_are_read_to_their_edge_and_no_further) {
  WorkerTeam team({{-1, 2, {}}});
  for (bool products : {false, true}) {
    for (int64_t dim : {1, 15, 16, 31, 32, 33, 64, 129}) {
      for (int64_t seq : {1, 5, 21}) {
        Case c({1, 5, 1, seq, dim});
        const std::vector<uint16_t> halves(static_cast<size_t>(seq * dim), 0x3f00);  // 0.5
        const PageEdge rows(halves.data(), halves.size() * sizeof(uint16_t));
        const std::vector<uint16_t> q(c.q.size(), 0x3f80);  // 1
        Attention a = c.attention();
        a.q = view_of(q.data(), Dtype::kBfloat16, {1, 5, dim});
        a.k = a.v = view_of(rows.data(), Dtype::kBfloat16, {1, 1, seq, dim});
        a.bf16_products = products;
        run_attention(a, team, best_isa());
        for (float value : c.out) CHECK_EQ(value, 0.5f);
        const double score = 0.25 * 0.5 * static_cast<double>(dim);
        for (float sum : c.sums) CHECK(std::abs(sum - score - std::log(seq)) < 1e-5);
      }
    }
  }
}

TEST(codes_and_their_scales_are_read_to_their_edge_and_no_further) {
  WorkerTeam team({{-1, 2, {}}});
  for (Isa isa : supported_isas()) {
    for (const auto& [dim, groups] : {std::pair{64, 1}, {80, 2}, {128, 2}, {192, 3}, {130, 1}}) {
      for (int64_t seq : {1, 5, 35}) {
        const int64_t row = dim == 130 ? 96 : groups * 32;
        Case c({1, 6, 1, seq, dim});
        const std::vector<uint8_t> codes(static_cast<size_t>(seq * row), 0x33);
        std::vector<F16> scales(static_cast<size_t>(seq * groups * 2));
        for (size_t i = 0; i < scales.size(); ++i) scales[i] = to_f16(i % 2 == 0 ? -1.0f : 0.5f);
        Attention a = c.attention();
        a.k = a.v = view_of(codes.data(), Dtype::kUint8, {1, 1, seq, row});
        a.k_groups = a.v_groups = view_of(scales.data(), Dtype::kFloat16, {1, 1, seq, groups, 2});
        for (bool integers : {false, true}) {
          a.integers = integers;
          std::ranges::fill(c.out, 3.0f);
          run_attention(a, team, isa);
          for (float value : c.out) CHECK(std::abs(value - 0.5f) < 1e-5);
        }
      }
    }
  }
}

TEST(codes_of_heads_side_by_side_are_read_to_their_edge_and_no_further) {
  WorkerTeam team({{-1, 2, {}}});
  constexpr int64_t kHeads = 5;
  for (bool integers : {false, true}) {
    for (int64_t groups : {1, 2}) {
      for (int64_t seq : {1, 17, 300}) {
        Case c({1, kHeads, kHeads, seq, groups * 64});
        const int64_t row = groups * 32;
        const std::vector<uint8_t> codes(static_cast<size_t>(seq * kHeads * row), 0x33);
        std::vector<F16> scales(static_cast<size_t>(seq * kHeads * groups * 2));
        for (size_t i = 0; i < scales.size(); ++i) scales[i] = to_f16(i % 2 == 0 ? -1.0f : 0.5f);
        Attention a = c.attention();
        a.integers = integers;
        a.k = view_of(codes.data(), Dtype::kUint8, {1, kHeads, seq, row});
        a.k.strides = {row, row, kHeads * row, 1};
        a.k_groups = view_of(scales.data(), Dtype::kFloat16, {1, kHeads, seq, groups, 2});
        a.k_groups.strides = {groups * 2, groups * 2, kHeads * groups * 2, 2, 1};
        a.v = a.k;
        a.v_groups = a.k_groups;
        run_attention(a, team, best_isa());
        for (float value : c.out) CHECK(std::abs(value - 0.5f) < 1e-5);
      }
    }
  }
}

TEST(blocks_of_a_table_are_read_no_further_than_the_length) {
  WorkerTeam team({{-1, 2, {}}});
  Case c({1, 2, 1, 12, 40});
  const std::vector<int32_t> table = {0, 1, 99};  // blocks of 4, in order; the last is not used
  for (Isa isa : supported_isas()) {
    Attention a = c.attention();
    a.k.shape = a.v.shape = {3, 1, 4, 40};
    a.k.strides = a.v.strides = {160, 160, 40, 1};
    a.table = {table.data(), 3, 3};
    a.lengths = {7};
    run_attention(a, team, isa);
    CHECK(c.error(7) < 2e-5);
    a.lengths = {9};
    CHECK_THROWS(InvalidArgument, run_attention(a, team, isa));
  }
}

TEST(nothing_attended_gives_zeros_and_minus_infinity) {
  WorkerTeam team({{-1, 2, {}}});
  Case c({2, 2, 2, 5, 8});
  const std::vector<uint8_t> none(10, 0);
  Attention a = c.attention();
  a.mask = none.data();
  a.mask_columns = 5;
  std::ranges::fill(c.out, 3.0f);
  run_attention(a, team, best_isa());
  for (float value : c.out) CHECK_EQ(value, 0.0f);
  for (float value : c.sums) CHECK_EQ(value, -std::numeric_limits<float>::infinity());
}

TEST(wrong_shapes_are_refused_before_anything_is_written) {
  WorkerTeam team({{-1, 1, {}}});
  Case c({2, 4, 2, 5, 8});
  std::ranges::fill(c.out, 3.0f);
  Attention a = c.attention();
  a.lengths = {5, 6};
  CHECK_THROWS(InvalidArgument, run_attention(a, team, best_isa()));
  a.lengths = {5};
  CHECK_THROWS(InvalidArgument, run_attention(a, team, best_isa()));
  a = c.attention();
  a.v.dtype = Dtype::kBfloat16;
  CHECK_THROWS(InvalidArgument, run_attention(a, team, best_isa()));
  for (float value : c.out) CHECK_EQ(value, 3.0f);
}

TEST(units_begin_on_the_node_of_their_keys) {
  const memory::Ground ground;
  // A sequence is 64 KiB of keys, and two units.
  memory::Rule rule = memory::rule_of(memory::RuleKind::kStripe, {{0, 1}, {1, 1}});
  rule.granule_bytes = 16 * memory::kPage;
  const memory::NumaRegion keys(ground.placer(), rule, 64 * memory::kPage);
  std::memset(keys.range().data(), 0, 64 * memory::kPage);
  Case c({4, 1, 1, 512, 64});
  Attention a = c.attention();
  a.k = view_of(keys.range().data(), Dtype::kFloat16, {4, 1, 512, 64});
  const Work work(a);
  const os::Kernel& kernel = *ground.kernel;
  using Units = std::vector<size_t>;
  const auto units = [&](const WorkerTeam& team, const os::Kernel* asked) {
    std::vector<Units> found;
    const WorkQueues<size_t> queues = queues_of(a, work.units, team, asked);
    for (size_t group = 0; group < queues.size(); ++group) found.push_back(queues.of(group));
    return found;
  };
  WorkerTeam both({{0, 1, {}}, {1, 2, {}}});
  CHECK((units(both, &kernel) == std::vector<Units>{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  CHECK((units(both, nullptr) == std::vector<Units>{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  const WorkerTeam one_there({{2, 1, {}}, {1, 2, {}}});
  CHECK((units(one_there, &kernel) == std::vector<Units>{{0, 4}, {1, 2, 3, 5, 6, 7}}));
  const WorkerTeam alone({{-1, 2, {}}});
  CHECK((units(alone, &kernel) == std::vector<Units>{{0, 1, 2, 3, 4, 5, 6, 7}}));

  run_attention(a, both, best_isa(), &kernel);
  const std::vector<float> shared = c.out;
  WorkerTeam single({{-1, 1, {}}});
  run_attention(a, single, best_isa());
  CHECK(shared == c.out);
  CHECK(c.out[0] != 0);
}

}  // namespace
}  // namespace cxl_offload::kernels
