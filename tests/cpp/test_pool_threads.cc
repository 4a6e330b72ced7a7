// A pool used from several threads at once; under the thread sanitizer as well.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_regions.h"
#include "gpu/fake_driver.h"
#include "memory/pool.h"

namespace cxl_offload::memory {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr int kThreads = 4;
constexpr int kRounds = 25000;

using Block = std::shared_ptr<Allocation>;

// Throws what a thread threw.
void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        errors[static_cast<size_t>(i)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Blocks that one thread made and another drops.
class Exchange {
 public:
  Block swap(size_t slot, Block block) {
    const std::lock_guard lock(mutex_);
    std::swap(slots_[slot % slots_.size()], block);
    return block;
  }

 private:
  std::mutex mutex_;
  std::vector<Block> slots_ = std::vector<Block>(64);
};

void churn(Pool& pool, gpu::FakeDriver& driver, Exchange& exchange, int thread) {
  std::mt19937_64 random(static_cast<uint64_t>(thread));
  for (int i = 0; i < kRounds; ++i) {
    const size_t bytes = size_t{1} << random() % 20;
    Block block = pool.allocate(bytes + random() % bytes);
    const auto stamp = static_cast<std::byte>(random());
    block->address()[0] = stamp;
    block->address()[block->bytes() - 1] = stamp;
    if (random() % 2 == 0) {
      const gpu::StreamId stream = 1 + random() % 3;
      block->record_stream(stream);
      driver.launch(stream);
    }
    if (random() % 64 == 0) driver.finish(1 + random() % 3);
    if (random() % 4096 == 0) pool.trim();
    if (random() % 512 == 0) pool.check_invariants();
    if (block->address()[0] != stamp || block->address()[block->bytes() - 1] != stamp) {
      throw check::Failure("two threads were given the same bytes");
    }
    exchange.swap(random(), std::move(block)).reset();
  }
}

void run_churn(FakeRules rules, bool pinned) {
  rules.backed = true;
  const auto driver = std::make_shared<gpu::FakeDriver>();
  if (pinned) rules.driver = driver;
  const auto source = std::make_shared<FakeSource>(rules);
  auto pool = std::make_shared<Pool>(source, pinned ? driver : nullptr);
  {
    Exchange exchange;
    in_threads(kThreads, [&](int thread) { churn(*pool, *driver, exchange, thread); });
  }
  pool->check_invariants();
  const auto statistics = pool->statistics();
  CHECK_EQ(statistics.asked.count.total, static_cast<uint64_t>(kThreads * kRounds));
  CHECK_EQ(statistics.asked.count.current, 0u);
  CHECK_EQ(statistics.mapped.bytes.current, source->account().now());
  pool->trim();
  CHECK_EQ(source->account().now(), 0u);
  CHECK_EQ(source->account().regions, 0u);
  CHECK_EQ(driver->counts().registered_ranges, 0u);
  CHECK_EQ(driver->counts().wrong_unregisters, 0u);
  CHECK_EQ(driver->counts().events, 0u);
}

TEST(four_threads_return_every_page) { run_churn({}, false); }
TEST(four_threads_return_every_page_when_pinned) { run_churn({}, true); }

TEST(others_allocate_and_free_while_one_thread_maps) {
  const auto source = std::make_shared<FakeSource>(FakeRules{});
  const auto pool = std::make_shared<Pool>(source);
  Block dropped = pool->allocate(kMiB);
  pool->allocate(kMiB / 2).reset();
  std::mutex mutex;
  std::condition_variable changed;
  bool mapping = false, finish = false;
  source->on_obtain = [&](size_t bytes) {
    if (bytes < 64 * kMiB) return;
    std::unique_lock lock(mutex);
    mapping = true;
    changed.notify_all();
    changed.wait(lock, [&] { return finish; });
  };
  std::thread mapper([&] { pool->allocate(64 * kMiB); });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return mapping; });
  }
  // Were the lock held, none of these would return.
  dropped.reset();
  const Block cached = pool->allocate(kMiB / 4);
  const Block grown = pool->allocate(4 * kMiB);
  CHECK_EQ(pool->statistics().asked.count.current, 2u);
  {
    const std::lock_guard lock(mutex);
    finish = true;
  }
  changed.notify_all();
  mapper.join();
  pool->check_invariants();
}

TEST(memory_that_others_cache_or_give_back_is_not_out_of_memory) {
  FakeRules rules;
  rules.limit_bytes = kThreads * 2 * kMiB;
  const auto source = std::make_shared<FakeSource>(rules);
  const auto pool = std::make_shared<Pool>(source);
  in_threads(kThreads, [&](int thread) {
    std::mt19937_64 random(static_cast<uint64_t>(thread));
    for (int i = 0; i < 3000; ++i) pool->allocate(kMiB + random() % kMiB).reset();
  });
  pool->check_invariants();
  CHECK(source->account().peak_bytes <= rules.limit_bytes);
}

TEST(memory_on_its_way_back_is_waited_for) {
  std::atomic<bool> returning = false, finish = false;
  FakeRules rules;
  rules.limit_bytes = 2 * kMiB;
  rules.on_return = [&] {
    returning = true;
    while (!finish) std::this_thread::yield();
  };
  const auto source = std::make_shared<FakeSource>(rules);
  const auto pool = std::make_shared<Pool>(source);
  pool->allocate(2 * kMiB).reset();
  std::thread trimmer([&] { pool->trim(); });
  while (!returning) std::this_thread::yield();
  std::thread timer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    finish = true;
  });
  const auto join_both = [&] {
    trimmer.join();
    timer.join();
  };
  Block block;
  try {
    block = pool->allocate(2 * kMiB);
  } catch (const OutOfMemory&) {
  }
  join_both();
  CHECK(block != nullptr);
}

TEST(last_owner_in_another_thread_destroys_the_pool) {
  for (int i = 0; i < 200; ++i) {
    const auto driver = std::make_shared<gpu::FakeDriver>();
    FakeRules rules;
    rules.driver = driver;
    const auto source = std::make_shared<FakeSource>(rules);
    auto pool = std::make_shared<Pool>(source, driver);
    std::vector<Block> blocks;
    for (int j = 0; j < kThreads; ++j) blocks.push_back(pool->allocate(kMiB));
    pool.reset();
    in_threads(kThreads, [&](int thread) {
      Block mine = std::move(blocks[static_cast<size_t>(thread)]);
      mine->record_stream(static_cast<gpu::StreamId>(thread) + 1);
      driver->launch(static_cast<gpu::StreamId>(thread) + 1);
    });
    CHECK_EQ(source->account().now(), 0u);
    CHECK_EQ(driver->counts().registered_ranges, 0u);
    CHECK_EQ(driver->counts().events, 0u);
  }
}

}  // namespace
}  // namespace cxl_offload::memory
