// Random operations against a simple model, and the account of what is mapped for what was asked.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "fake_regions.h"
#include "gpu/fake_driver.h"
#include "memory/pool.h"

namespace cxl_offload::memory {
namespace {

constexpr size_t kKiB = size_t{1} << 10;
constexpr size_t kGiB = size_t{1} << 30;

size_t log_uniform(std::mt19937_64& random, double least, double most) {
  std::uniform_real_distribution<double> exponent(std::log2(least), std::log2(most));
  return static_cast<size_t>(std::exp2(exponent(random)));
}

// Live blocks by address. Knows nothing of regions, extents or slabs.
class Model {
 public:
  explicit Model(size_t page_bytes) : page_bytes_(page_bytes) {}

  void add(const Allocation& block) {
    const auto begin = reinterpret_cast<uintptr_t>(block.address());
    const bool large = block.bytes() >= page_bytes_;
    CHECK_EQ(begin % (large ? page_bytes_ : 64), 0u);
    CHECK(block.capacity() >= block.bytes());
    // A page or more owns its pages; the rest shares pages, but not with those.
    const size_t unit = block.owns_pages() ? page_bytes_ : 64;
    const uintptr_t end = (begin + block.bytes() + unit - 1) / unit * unit;
    const auto next = blocks_.lower_bound(begin);
    CHECK(next == blocks_.end() || next->first >= end);
    CHECK(next == blocks_.begin() || std::prev(next)->second <= begin);
    blocks_[begin] = end;
    asked_ += block.bytes();
  }
  void remove(const Allocation& block) {
    blocks_.erase(reinterpret_cast<uintptr_t>(block.address()));
    asked_ -= block.bytes();
  }
  size_t asked() const { return asked_; }

 private:
  const size_t page_bytes_;
  std::map<uintptr_t, uintptr_t> blocks_;
  size_t asked_ = 0;
};

struct Case {
  const char* name;
  FakeRules rules;
  bool pinned = false;
  int steps = 25000;
};

void stamp(const Allocation& block, std::mt19937_64::result_type value) {
  std::memcpy(block.address(), &value, std::min(block.bytes(), sizeof value));
}

bool has_stamp(const Allocation& block, std::mt19937_64::result_type value) {
  return std::memcmp(block.address(), &value, std::min(block.bytes(), sizeof value)) == 0;
}

void run_against_model(Case c) {
  std::mt19937_64 random(99);
  const auto driver = std::make_shared<gpu::FakeDriver>();
  if (c.pinned) c.rules.driver = driver;
  const auto source = std::make_shared<FakeSource>(c.rules);
  auto pool = std::make_shared<Pool>(source, c.pinned ? driver : nullptr);
  Model model(c.rules.page_bytes);
  struct Live {
    std::shared_ptr<Allocation> block;
    uint64_t value;
  };
  std::vector<Live> live;
  std::set<uintptr_t> displaced;
  for (int step = 0; step < c.steps; ++step) {
    const auto dice = random() % 1000;
    const size_t wanted = step / 2000 % 2 == 0 ? 300 : 40;  // fills up, empties, ...
    if (dice == 0) {
      pool->trim();
    } else if (dice % 2 == 0 ? live.size() < wanted : live.empty()) {
      const size_t bytes = log_uniform(random, 1, 512.0 * kKiB);
      Live fresh{pool->allocate(bytes), random()};
      model.add(*fresh.block);
      CHECK_EQ(displaced.count(reinterpret_cast<uintptr_t>(fresh.block->address())), 0u);
      if (c.rules.backed) stamp(*fresh.block, fresh.value);
      live.push_back(std::move(fresh));
    } else if (!live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      Live& last = live.back();
      if (c.rules.backed) CHECK(has_stamp(*last.block, last.value));
      if (c.pinned && random() % 2 == 0) {
        const gpu::StreamId stream = 1 + random() % 3;
        last.block->record_stream(stream);
        driver->launch(stream);
      }
      if (last.block->owns_pages() && random() % 16 == 0) {
        last.block->displace();
        // Without backing, addresses are never mapped again.
        if (!c.rules.backed) displaced.insert(reinterpret_cast<uintptr_t>(last.block->address()));
      }
      model.remove(*last.block);
      live.pop_back();
      if (random() % 8 == 0) driver->finish(1 + random() % 3);
    }
    if (step % 500 == 0) {
      pool->check_invariants();
      const auto statistics = pool->statistics();
      CHECK_EQ(statistics.asked.bytes.current, model.asked());
      CHECK_EQ(statistics.asked.count.current, live.size());
      CHECK_EQ(statistics.mapped.bytes.current, source->account().now());
    }
  }
  CHECK_EQ(pool->statistics().mapped.bytes.peak, source->account().peak_bytes);
  live.clear();
  pool->trim();
  pool->check_invariants();
  CHECK_EQ(source->account().now(), 0u);
  CHECK_EQ(source->account().regions, 0u);
  CHECK_EQ(driver->counts().registered_ranges, 0u);
  CHECK_EQ(driver->counts().wrong_unregisters, 0u);
  CHECK_EQ(driver->counts().events, 0u);
  pool.reset();
}

TEST(random_operations_equal_model_with_base_pages) {
  run_against_model({"base", {}, false, 100000});
}

TEST(random_operations_equal_model_with_memory_behind) {
  FakeRules rules;
  rules.backed = true;
  run_against_model({"backed", rules, false});
}

TEST(random_operations_equal_model_when_pinned) { run_against_model({"pinned", {}, true}); }

TEST(random_operations_equal_model_when_striped) {
  FakeRules rules;
  rules.cycle_bytes = 24 * kKiB;
  rules.odd_bytes = 16 * kKiB;
  run_against_model({"striped", rules});
}

TEST(random_operations_equal_model_when_striped_and_pinned) {
  FakeRules rules;
  rules.cycle_bytes = 24 * kKiB;
  run_against_model({"striped and pinned", rules, true});
}

TEST(random_operations_equal_model_when_no_region_serves_twice) {
  FakeRules rules;
  rules.keeps = false;
  run_against_model({"first touch", rules});
}

TEST(random_operations_equal_model_with_pages_that_most_share) {
  FakeRules rules;
  rules.page_bytes = 256 * kKiB;
  run_against_model({"huge", rules});
}

TEST(random_operations_equal_model_when_parts_cannot_be_returned) {
  FakeRules rules;
  rules.refuse_release = true;
  run_against_model({"no release", rules});
}

// Mapped bytes over asked bytes, each at its peak.
double waste_of(const Pool& pool, const char* trace) {
  const Statistics s = pool.statistics();
  const double waste =
      static_cast<double>(s.mapped.bytes.peak) / static_cast<double>(s.asked.bytes.peak);
  std::printf("     %-48s asked %8.3f GiB  mapped/asked %.5f  regions %5lu  reused %5.2f %%\n",
              trace, static_cast<double>(s.asked.bytes.peak) / kGiB, waste,
              static_cast<unsigned long>(s.mapped.count.peak),
              100.0 * static_cast<double>(s.reuses) / static_cast<double>(s.reuses + s.growths));
  return waste;
}

std::shared_ptr<Pool> pool_of(bool pinned) {
  FakeRules rules;
  const auto driver = pinned ? std::make_shared<gpu::FakeDriver>() : nullptr;
  rules.driver = driver;
  return std::make_shared<Pool>(std::make_shared<FakeSource>(rules), driver);
}

// OPT-66B as FlexGen 0.1.8 allocates it on the host: every weight a tensor, K and V for each layer
// and batch, two fp32 workspaces, and activations and masks that come and go with every layer.
// Shapes: Zhang et al., "OPT: Open Pre-trained Transformer Language Models", Table 1; pieces:
// flexgen/flex_opt.py and flexgen/pytorch_backend.py.
void run_opt_66b(Pool& pool) {
  constexpr size_t kLayers = 64, kHidden = 9216, kVocabulary = 50272, kPositions = 2048 + 2;
  constexpr size_t kHalf = 2, kFloat = 4, kBatch = 8, kBatches = 3, kPrompt = 512, kNew = 32;
  std::vector<std::shared_ptr<Allocation>> kept;
  const auto keep = [&](size_t bytes) { kept.push_back(pool.allocate(bytes)); };
  const auto keep_norm = [&] {
    keep(kHidden * kHalf);
    keep(kHidden * kHalf);
  };
  keep(kVocabulary * kHidden * kHalf);
  keep(kPositions * kHidden * kHalf);
  for (size_t layer = 0; layer < kLayers; ++layer) {
    for (int projection = 0; projection < 4; ++projection) {
      keep(kHidden * kHidden * kHalf);
      keep(kHidden * kHalf);
    }
    keep_norm();
    keep(4 * kHidden * kHidden * kHalf);
    keep(4 * kHidden * kHalf);
    keep(4 * kHidden * kHidden * kHalf);
    keep(kHidden * kHalf);
    keep_norm();
  }
  keep_norm();
  keep(kVocabulary * kHidden * kHalf);
  for (int buffer = 0; buffer < 4; ++buffer) {
    keep((kPrompt + kNew - 1) * kBatch * kHidden * kFloat);
  }
  for (size_t cache = 0; cache < kLayers * kBatches * 2; ++cache) {
    keep((kPrompt + kNew - 1) * kBatch * kHidden * kHalf);
  }
  for (size_t token = 0; token < kNew; ++token) {
    const size_t positions = token == 0 ? kPrompt : 1;
    std::vector<std::shared_ptr<Allocation>> masks, hidden(kBatches);
    for (size_t batch = 0; batch < kBatches; ++batch) {
      masks.push_back(pool.allocate(kBatch * (kPrompt + token)));
      const auto ids = pool.allocate(kBatch * positions * sizeof(int32_t));
    }
    for (size_t layer = 0; layer < 2 * kLayers + 2; ++layer) {
      for (auto& activation : hidden) {
        auto next = pool.allocate(kBatch * positions * kHidden * kHalf);
        activation = std::move(next);
      }
    }
  }
}

TEST(waste_of_opt_66b_is_within_the_bar) {
  for (const bool pinned : {false, true}) {
    const auto pool = pool_of(pinned);
    run_opt_66b(*pool);
    CHECK(waste_of(*pool, pinned ? "OPT-66B, pinned" : "OPT-66B") <= 1.02);
    CHECK(pool->statistics().asked.bytes.peak > 120 * kGiB);
    pool->check_invariants();
  }
}

void run_log_uniform(Pool& pool, size_t window_bytes, int count) {
  std::mt19937_64 random(5);
  std::vector<std::shared_ptr<Allocation>> live;
  size_t live_bytes = 0;
  for (int i = 0; i < count; ++i) {
    const size_t bytes = log_uniform(random, 64, static_cast<double>(kGiB));
    while (live_bytes + bytes > window_bytes) {
      std::swap(live[random() % live.size()], live.back());
      live_bytes -= live.back()->bytes();
      live.pop_back();
    }
    live.push_back(pool.allocate(bytes));
    live_bytes += bytes;
  }
}

TEST(waste_of_log_uniform_sizes_is_within_the_bar) {
  for (const size_t window : {4 * kGiB, 64 * kGiB, 1024 * kGiB}) {
    for (const bool pinned : {false, true}) {
      const auto pool = pool_of(pinned);
      run_log_uniform(*pool, window, 100000);
      const auto name = "log-uniform 64 B..1 GiB, " + std::to_string(window / kGiB) + " GiB live" +
                        (pinned ? ", pinned" : "");
      CHECK(waste_of(*pool, name.c_str()) <= 1.02);
      pool->check_invariants();
    }
  }
}

}  // namespace
}  // namespace cxl_offload::memory
