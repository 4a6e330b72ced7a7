// Updates over every way that streams can lie in memory, on both sides of every size at which the
// kernels change their ways, under the sanitizers; and threads that compute as their caller does.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "kernels/float_mode.h"
#include "kernels/update.h"
#include "kernels/worker_team.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cxl_offload::kernels {
namespace {

// Elements of a 16-bit copy from which it goes past the caches (kernels/update.cc: 4 MiB).
constexpr size_t kPastCaches = (size_t{4} << 20) / 2 + 1;
constexpr size_t kGuard = 64;  // elements on both sides that nobody may write

// A stream that begins `offset` elements after a page, between guards, the last of them at the end
// of the storage: the sanitizer sees what is read or written behind it.
struct Stream {
  Stream(Dtype dtype, size_t numel, size_t offset)
      : dtype(dtype), numel(numel), bytes((numel + offset + kGuard) * dtype_bytes(dtype) + kPage) {
    const auto address = reinterpret_cast<uintptr_t>(bytes.data());
    begin = (kPage - address % kPage) % kPage + offset * dtype_bytes(dtype);
    bytes.resize(begin + (numel + kGuard) * dtype_bytes(dtype));
  }

  TensorView view() {
    return make_view(reinterpret_cast<uintptr_t>(bytes.data()) + begin, dtype,
                     {static_cast<int64_t>(numel)}, {1});
  }
  // Numbers of float32. Copied and compared as bytes: under the sanitizers a loop over elements
  // takes longer than the updates.
  void fill(const std::vector<float>& numbers) {
    std::memcpy(bytes.data() + begin, numbers.data(), numel * sizeof(float));
  }
  bool same_values(const Stream& other) const {
    return numel == other.numel && dtype == other.dtype &&
           std::memcmp(bytes.data() + begin, other.bytes.data() + other.begin,
                       numel * dtype_bytes(dtype)) == 0;
  }
  bool guards_are_clean() const {
    const auto end = static_cast<std::ptrdiff_t>(begin + numel * dtype_bytes(dtype));
    const auto clean = [](std::byte value) { return value == std::byte{0}; };
    return std::all_of(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(begin), clean) &&
           std::all_of(bytes.begin() + end, bytes.end(), clean);
  }

  static constexpr size_t kPage = 4096;
  Dtype dtype;
  size_t numel;
  size_t begin = 0;
  std::vector<std::byte> bytes;
};

struct Streams {
  Streams(const UpdateRule& rule, size_t numel, const std::vector<size_t>& offsets, Dtype copy)
      : rule(rule) {
    for (size_t i = 0; i < 2 + state_count(rule); ++i) {
      all.emplace_back(Dtype::kFloat32, numel, offsets[i]);
      all.back().fill(normal(i, numel));
    }
    all.emplace_back(copy, numel, offsets[4]);
  }

  // So many numbers of a seed, and perhaps more: they are drawn once.
  static const std::vector<float>& normal(size_t seed, size_t numel) {
    static std::map<size_t, std::vector<float>> drawn;
    std::vector<float>& values = drawn[seed];
    if (values.empty()) {
      std::mt19937 random(static_cast<uint32_t>(seed));
      std::normal_distribution<float> draw;
      for (int i = 0; i < 1021; ++i) {
        values.push_back(seed >= 2 ? std::abs(draw(random)) : draw(random));
      }
    }
    while (values.size() < numel) values.push_back(values[values.size() - 1021]);
    return values;
  }
  Update update() {
    Update made{rule, all[0].view(), all[1].view(), {}, all.back().view()};
    for (size_t i = 0; i < state_count(rule); ++i) made.states.push_back(all[2 + i].view());
    return made;
  }
  bool same_values(const Streams& other) const {
    return std::ranges::equal(
        all, other.all, [](const Stream& one, const Stream& two) { return one.same_values(two); });
  }

  UpdateRule rule;
  std::vector<Stream> all;
};

std::vector<UpdateRule> rules() {
  Adam adam;
  adam.step = 2;
  adam.lr = adam.weight_decay = 0.1;
  adam.beta1 = 0.9;
  adam.beta2 = 0.99;
  adam.eps = 1e-8;
  Lion lion;
  lion.lr = 0.1;
  lion.beta1 = 0.9;
  lion.beta2 = 0.99;
  Adagrad adagrad;
  adagrad.lr = 0.1;
  adagrad.eps = 1e-10;
  return {adam, lion, adagrad};
}

void check_like_aligned(const UpdateRule& rule, size_t numel, const std::vector<size_t>& offsets,
                        Dtype copy, Isa isa, size_t threads, const Streams& expected) {
  Streams streams(rule, numel, offsets, copy);
  WorkerTeam team({{-1, threads, {}}});
  run_updates({streams.update()}, team, {isa});
  CHECK(streams.same_values(expected));
  for (const Stream& stream : streams.all) CHECK(stream.guards_are_clean());
}

TEST(large_copies_take_any_offset_of_any_stream) {
  const std::vector<std::vector<size_t>> places = {
      {1, 0, 0, 0, 0}, {8, 1, 2, 3, 5}, {15, 0, 0, 0, 16}, {0, 0, 0, 0, 1}, {33, 7, 0, 9, 31}};
  for (const UpdateRule& rule : rules()) {
    for (Dtype copy : {Dtype::kBfloat16, Dtype::kFloat16}) {
      Streams expected(rule, kPastCaches, {0, 0, 0, 0, 0}, copy);
      WorkerTeam alone({{-1, 1, {}}});
      run_updates({expected.update()}, alone, {best_isa()});
      for (Isa isa : supported_isas()) {
        for (const auto& offsets : places) {
          check_like_aligned(rule, kPastCaches, offsets, copy, isa, 1 + offsets[0] % 3, expected);
        }
      }
    }
  }
}

TEST(sizes_around_every_threshold_take_any_offset) {
  std::mt19937 random(7);
  const UpdateRule rule = rules()[0];
  // A block, a page of elements, what one thread runs alone, a chunk, a copy past the caches.
  for (size_t threshold : {32u, 1024u, 16384u, 262144u, 2097152u}) {
    for (size_t numel : {threshold - 1, threshold, threshold + 1, threshold + 33}) {
      Streams expected(rule, numel, {0, 0, 0, 0, 0}, Dtype::kBfloat16);
      WorkerTeam alone({{-1, 1, {}}});
      run_updates({expected.update()}, alone, {Isa::kScalar});
      for (int repeat = 0; repeat < (numel > 100000 ? 2 : 8); ++repeat) {
        std::vector<size_t> offsets(5);
        for (size_t& offset : offsets) offset = random() % 70;
        check_like_aligned(rule, numel, offsets, Dtype::kBfloat16, best_isa(), 1 + repeat % 4,
                           expected);
      }
    }
  }
}

#if defined(__x86_64__)

constexpr unsigned kFlush = 0x8040;  // subnormal results and operands become zero
constexpr unsigned kTowardsZero = 0x6000;

TEST(threads_compute_in_the_mode_of_each_caller_and_get_their_own_back) {
  const unsigned before = _mm_getcsr();
  WorkerTeam team({{-1, 3, {}}, {9, 2, {}}});
  for (unsigned mode : {kFlush, 0u, kTowardsZero, kFlush | kTowardsZero, 0u}) {
    _mm_setcsr(before | mode);
    std::atomic<int> alike = 0;
    team.run([&](size_t) {
      if ((_mm_getcsr() & (kFlush | kTowardsZero)) == mode) ++alike;
    });
    CHECK_EQ(alike.load(), 5);
    CHECK_EQ(_mm_getcsr() & ~0x3fu, (before | mode) & ~0x3fu);
  }
  _mm_setcsr(before);
}

TEST(mode_is_taken_from_each_of_several_callers) {
  WorkerTeam team({{-1, 2, {}}});
  std::atomic<bool> mixed = false;
  std::vector<std::thread> callers;
  for (unsigned mode : {0u, kFlush}) {
    callers.emplace_back([&, mode] {
      _mm_setcsr(_mm_getcsr() | mode);
      for (int repeat = 0; repeat < 100; ++repeat) {
        team.run([&](size_t) {
          if ((_mm_getcsr() & kFlush) != mode) mixed = true;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(!mixed);
}

#endif

TEST(scoped_mode_gives_back_what_was_there) {
  const FloatMode before = FloatMode::of_this_thread();
  {
    const ScopedFloatMode same(before);
    CHECK(FloatMode::of_this_thread() == before);
  }
  CHECK(FloatMode::of_this_thread() == before);
}

}  // namespace
}  // namespace cxl_offload::kernels
