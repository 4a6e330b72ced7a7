// Optimizer updates: the 16-bit formats, the loops of every instruction set, the team of threads.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "check.h"
#include "core/error.h"
#include "core/half.h"
#include "kernels/update.h"
#include "kernels/update_check.h"
#include "kernels/worker_team.h"

namespace cxl_offload::kernels {
namespace {

TEST(every_float16_survives_the_way_through_float) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const F16 value{static_cast<uint16_t>(bits)};
    const F16 back = to_f16(to_float(value));
    const bool nan = (bits & 0x7fff) > 0x7c00;
    CHECK_EQ(back.bits, nan ? bits | 0x200 : bits);
  }
}

TEST(every_bfloat16_survives_the_way_through_float) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const Bf16 value{static_cast<uint16_t>(bits)};
    const bool nan = (bits & 0x7fff) > 0x7f80;
    CHECK_EQ(to_bf16(to_float(value)).bits, nan ? bits | 0x40 : bits);
  }
}

// Between two neighbours: below the middle goes down, above it up, and on it to the even one.
template <class T>
void check_rounding(T (*round)(float), uint32_t infinity) {
  for (uint32_t bits = 0; bits + 1 < infinity; ++bits) {
    const float low = to_float(T{static_cast<uint16_t>(bits)});
    const float high = to_float(T{static_cast<uint16_t>(bits + 1)});
    const float middle = static_cast<float>((double{low} + double{high}) / 2);
    if (middle <= low || middle >= high) continue;  // subnormal floats have nothing between
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    CHECK_EQ(round(middle).bits, even);
    CHECK_EQ(round(-middle).bits, even | 0x8000);
    CHECK_EQ(round(std::nextafter(middle, low)).bits, bits);
    CHECK_EQ(round(std::nextafter(middle, high)).bits, bits + 1);
  }
}

TEST(float16_rounds_to_nearest_even) { check_rounding<F16>(&to_f16, 0x7c00); }
TEST(bfloat16_rounds_to_nearest_even) { check_rounding<Bf16>(&to_bf16, 0x7f80); }

TEST(what_is_too_large_for_float16_is_infinite) {
  CHECK_EQ(to_f16(65519.996f).bits, 0x7bff);
  CHECK_EQ(to_f16(65520.0f).bits, 0x7c00);
  CHECK_EQ(to_f16(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
}

struct Buffers {
  explicit Buffers(size_t numel, uint32_t seed = 1) : values(4, std::vector<float>(numel)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (auto& one : values) {
      for (float& value : one) value = normal(random);
    }
    // Sums of squares, as the second state of Adam and the first of Adagrad.
    for (float& value : values[2]) value = std::abs(value);
    for (float& value : values[3]) value = std::abs(value);
  }

  TensorView view(size_t index) {
    const auto numel = static_cast<int64_t>(values[index].size());
    return make_view(reinterpret_cast<uintptr_t>(values[index].data()), Dtype::kFloat32, {numel},
                     {1});
  }
  Update update(UpdateRule rule) {
    Update made{rule, view(0), view(1), {view(2)}, {}};
    if (state_count(rule) == 2) made.states.push_back(view(3));
    return made;
  }

  std::vector<std::vector<float>> values;
};

Adam adam() {
  Adam rule;
  rule.step = 2;
  rule.lr = 0.1;
  rule.beta1 = 0.9;
  rule.beta2 = 0.99;
  rule.eps = 1e-8;
  rule.weight_decay = 0.1;
  return rule;
}

Lion lion() {
  Lion rule;
  rule.lr = 0.1;
  rule.beta1 = 0.9;
  rule.beta2 = 0.99;
  return rule;
}

Adagrad adagrad() {
  Adagrad rule;
  rule.lr = 0.1;
  rule.eps = 1e-10;
  return rule;
}

TEST(every_instruction_set_and_team_computes_the_same_bits) {
  for (const UpdateRule& rule : {UpdateRule(adam()), UpdateRule(lion()), UpdateRule(adagrad())}) {
    for (size_t numel : {0u, 1u, 31u, 33u, 100u, 70001u}) {
      Buffers expected(numel);
      WorkerTeam alone({{-1, 1, {}}});
      run_updates({expected.update(rule)}, alone, {Isa::kScalar});
      for (Isa isa : supported_isas()) {
        for (size_t threads : {1u, 2u, 5u}) {
          Buffers buffers(numel);
          WorkerTeam team({{-1, threads, {}}});
          run_updates({buffers.update(rule)}, team, {isa});
          CHECK(buffers.values == expected.values);
        }
      }
    }
  }
}

TEST(many_updates_in_one_go_equal_one_after_another) {
  std::vector<Buffers> together;
  std::vector<Buffers> apart;
  for (size_t numel : {5u, 40000u, 0u, 33u, 20000u}) {
    together.emplace_back(numel);
    apart.emplace_back(numel);
  }
  WorkerTeam team({{-1, 3, {}}});
  std::vector<Update> updates;
  for (Buffers& one : together) updates.push_back(one.update(adam()));
  run_updates(updates, team, {best_isa()});
  for (Buffers& one : apart) run_updates({one.update(adam())}, team, {best_isa()});
  for (size_t i = 0; i < together.size(); ++i) CHECK(together[i].values == apart[i].values);
}

TEST(one_wrong_update_among_many_stops_all_before_writing) {
  Buffers good(100);
  Buffers bad(100);
  const Buffers before = good;
  WorkerTeam team({{-1, 1, {}}});
  Update wrong = bad.update(adam());
  wrong.states[1].shape = {99};
  CHECK_THROWS(InvalidArgument, run_updates({good.update(adam()), wrong}, team, {}));
  wrong = bad.update(adam());
  wrong.grad.strides = {2};
  CHECK_THROWS(InvalidArgument, run_updates({good.update(adam()), wrong}, team, {}));
  wrong = bad.update(adam());
  wrong.states[0] = good.view(0);
  CHECK_THROWS(InvalidArgument, run_updates({good.update(adam()), wrong}, team, {}));
  wrong = bad.update(adam());
  wrong.states.pop_back();
  CHECK_THROWS(InvalidArgument, run_updates({good.update(adam()), wrong}, team, {}));
  CHECK(good.values == before.values);
}

TEST(settings_that_float32_cannot_hold_are_refused_by_name) {
  Adam rule = adam();
  rule.lr = 1e300;
  CHECK(CHECK_THROWS(InvalidArgument, check_rule(rule)).starts_with("update: lr is 1e+300;"));
  rule = adam();
  rule.lr = 3e38;
  rule.step = 1;
  rule.beta1 = 0.9;
  CHECK_THROWS(InvalidArgument, check_rule(rule));  // lr / (1 - beta1) is too much
  rule.bias_correction = false;
  rule.weight_decay = 0;
  check_rule(rule);
  rule.weight_decay = 10;
  CHECK_THROWS(InvalidArgument, check_rule(rule));
  rule = adam();
  rule.eps = 1e-60;
  CHECK_THROWS(InvalidArgument, check_rule(rule));
  rule.eps = 0;
  check_rule(rule);
  rule.grad_scale = -1e39;
  CHECK_THROWS(InvalidArgument, check_rule(rule));
  CHECK_THROWS(InvalidArgument, check_rule(Lion{1e30, 0.9, 0.99, 1e30, 1}));
}

TEST(one_gradient_may_serve_two_parameters) {
  Buffers first(50);
  Buffers second(50);
  WorkerTeam team({{-1, 1, {}}});
  Update other = second.update(adam());
  other.grad = first.view(1);
  second.values[1] = first.values[1];
  run_updates({first.update(adam()), other}, team, {});
  CHECK(first.values == second.values);
}

TEST(a_range_inside_of_a_longer_one_is_found_behind_shorter_ones) {
  Buffers outer(1000);
  Buffers inner(10);
  Update inside = inner.update(adam());
  inside.param.data = outer.view(0).data + 400;
  Update before = Buffers(10).update(adam());
  before.param.data = outer.view(1).data;  // shares a gradient's bytes
  WorkerTeam team({{-1, 1, {}}});
  CHECK_THROWS(InvalidArgument, run_updates({outer.update(adam()), inside}, team, {}));
}

TEST(team_runs_a_job_once_on_every_thread) {
  WorkerTeam team({{0, 3, {}}, {1, 2, {}}});
  CHECK_EQ(team.threads(), 5u);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::atomic<int> first = 0;
    std::atomic<int> second = 0;
    team.run([&](size_t group) { ++(group == 0 ? first : second); });
    CHECK_EQ(first.load(), 3);
    CHECK_EQ(second.load(), 2);
  }
}

TEST(callers_of_one_team_take_turns) {
  WorkerTeam team({{-1, 3, {}}});
  std::atomic<int> inside = 0;
  std::atomic<int> runs = 0;
  std::atomic<bool> crowded = false;
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        team.run([&](size_t) {
          if (++inside > 3) crowded = true;
          ++runs;
          --inside;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(!crowded);
  CHECK_EQ(runs.load(), 4 * 20 * 3);
}

// The thread sanitizer does not follow a child that starts threads after a fork.
#if !defined(__SANITIZE_THREAD__)
TEST(forked_child_starts_threads_of_its_own) {
  WorkerTeam team({{-1, 3, {}}});
  const auto count = [&team] {
    std::atomic<int> runs = 0;
    team.run([&](size_t) { ++runs; });
    return runs.load();
  };
  CHECK_EQ(count(), 3);
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) _exit(count() == 3 && count() == 3 ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK_EQ(count(), 3);
}
#endif

}  // namespace
}  // namespace cxl_offload::kernels
