// What an allocation and a free cost, against malloc, with many blocks live: the time must grow no
// faster than the logarithm of their number. Correctness first: every block is checked for overlap
// and the pool's account is added up again.
//
//   make -C tests/cpp bench          or: bench_pool [--json]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "fake_regions.h"
#include "memory/pool.h"

namespace cxl_offload::memory {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRepeats = 7;
constexpr size_t kSteps = 200000;

struct Spread {
  double median_ns = 0;
  double least_ns = 0;
  double most_ns = 0;
};

Spread spread_of(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2], samples.front(), samples.back()};
}

enum class Sizes { kOne, kSmall, kLarge };

const char* name_of(Sizes sizes) {
  switch (sizes) {
    case Sizes::kOne:
      return "64 KiB";
    case Sizes::kSmall:
      return "64 B..4 KiB";
    case Sizes::kLarge:
      return "4 KiB..1 MiB";
  }
  return "";
}

std::vector<size_t> draw(Sizes sizes, size_t count, std::mt19937_64& random) {
  std::vector<size_t> drawn(count);
  const double least = sizes == Sizes::kSmall ? 6 : 12, most = sizes == Sizes::kSmall ? 12 : 20;
  std::uniform_real_distribution<double> exponent(least, most);
  for (size_t& bytes : drawn) {
    bytes =
        sizes == Sizes::kOne ? size_t{64} << 10 : static_cast<size_t>(std::exp2(exponent(random)));
  }
  return drawn;
}

// One step frees a random live block and allocates another. `Slot` owns a block.
template <class Slot, class Allocate>
Spread time_steps(Sizes sizes, size_t live, Allocate allocate) {
  std::mt19937_64 random(3);
  const auto first = draw(sizes, live, random);
  const auto next = draw(sizes, kSteps, random);
  std::vector<size_t> victims(kSteps);
  for (size_t& victim : victims) victim = random() % live;
  std::vector<Slot> slots;
  slots.reserve(live);
  for (const size_t bytes : first) slots.push_back(allocate(bytes));
  std::vector<double> samples;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto begin = Clock::now();
    for (size_t i = 0; i < kSteps; ++i) {
      Slot& slot = slots[victims[i]];
      slot = Slot();
      slot = allocate(next[i]);
    }
    const std::chrono::duration<double, std::nano> took = Clock::now() - begin;
    samples.push_back(took.count() / kSteps);
  }
  return spread_of(samples);
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Owned = std::unique_ptr<void, Free>;

// Every block apart from every other.
void check(Pool& pool) {
  std::mt19937_64 random(4);
  std::vector<std::shared_ptr<Allocation>> blocks;
  for (const size_t bytes : draw(Sizes::kLarge, 2000, random))
    blocks.push_back(pool.allocate(bytes));
  for (size_t i = 0; i < blocks.size(); i += 2) blocks[i].reset();
  for (size_t i = 0; i < blocks.size(); i += 2) blocks[i] = pool.allocate(4096 * (1 + i % 30));
  std::sort(blocks.begin(), blocks.end(),
            [](const auto& a, const auto& b) { return a->address() < b->address(); });
  for (size_t i = 1; i < blocks.size(); ++i) {
    if (blocks[i - 1]->address() + blocks[i - 1]->capacity() > blocks[i]->address()) {
      std::fprintf(stderr, "bench_pool: two blocks overlap\n");
      std::exit(1);
    }
  }
  pool.check_invariants();
}

std::shared_ptr<Pool> make_pool() {
  // Addresses only: what mapping costs is the kernel's business and measured elsewhere.
  return std::make_shared<Pool>(std::make_shared<FakeSource>(FakeRules{}));
}

struct Row {
  Sizes sizes;
  size_t live;
  const char* allocator;
  Spread step;
};

std::vector<Row> measure() {
  std::vector<Row> rows;
  for (const Sizes sizes : {Sizes::kOne, Sizes::kSmall, Sizes::kLarge}) {
    for (const size_t live : {size_t{1000}, size_t{10000}, size_t{100000}}) {
      const auto pool = make_pool();
      rows.push_back({sizes, live, "pool",
                      time_steps<std::shared_ptr<Allocation>>(
                          sizes, live, [&](size_t bytes) { return pool->allocate(bytes); })});
      pool->check_invariants();
      rows.push_back({sizes, live, "malloc", time_steps<Owned>(sizes, live, [](size_t bytes) {
                        return Owned(std::malloc(bytes));
                      })});
      // Whole pages of its own for every block, as the pool gives.
      if (sizes == Sizes::kSmall) continue;
      rows.push_back(
          {sizes, live, "aligned_alloc", time_steps<Owned>(sizes, live, [](size_t bytes) {
             return Owned(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
           })});
    }
  }
  return rows;
}

void print_table(const std::vector<Row>& rows) {
  std::printf("free and allocate one block, ns (measured; median of %d, least..most)\n", kRepeats);
  std::printf("%-14s %8s  %-14s %8s\n", "sizes", "live", "allocator", "ns");
  for (const Row& row : rows) {
    std::printf("%-14s %8zu  %-14s %8.0f  (%.0f..%.0f)\n", name_of(row.sizes), row.live,
                row.allocator, row.step.median_ns, row.step.least_ns, row.step.most_ns);
  }
}

void print_json(const std::vector<Row>& rows) {
  std::printf(
      "{\"benchmark\": \"pool\", \"kind\": \"measured\", \"unit\": \"ns per step\", "
      "\"steps\": %zu, \"repeats\": %d, \"rows\": [",
      kSteps, kRepeats);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    std::printf(
        "%s{\"sizes\": \"%s\", \"live\": %zu, \"allocator\": \"%s\", \"median\": %.1f, "
        "\"least\": %.1f, \"most\": %.1f}",
        i == 0 ? "" : ", ", name_of(row.sizes), row.live, row.allocator, row.step.median_ns,
        row.step.least_ns, row.step.most_ns);
  }
  std::printf("]}\n");
}

}  // namespace
}  // namespace cxl_offload::memory

int main(int argc, char** argv) {
  using namespace cxl_offload::memory;
  check(*make_pool());
  const auto rows = measure();
  if (argc > 1 && std::strcmp(argv[1], "--json") == 0) {
    print_json(rows);
  } else {
    print_table(rows);
  }
  return 0;
}
