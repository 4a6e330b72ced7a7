// The copy engine under the sanitizers: threads, failures and what is left at the end. What it does
// to bytes and links is in tests/transfer.
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "gpu/fake_driver.h"
#include "transfer/copy_engine.h"

namespace cxl_offload::transfer {
namespace {

constexpr size_t kChunk = 4096;

using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = std::byte(random() & 255);
  return bytes;
}

struct Fixture {
  explicit Fixture(size_t limit_bytes = 16 * kChunk) {
    engine = std::make_unique<CopyEngine>(driver, copier, std::span(staging),
                                          EngineOptions{kChunk, limit_bytes, {}});
  }
  std::shared_ptr<gpu::FakeDriver> driver = std::make_shared<gpu::FakeDriver>();
  std::shared_ptr<HostCopier> copier =
      std::make_shared<HostCopier>(std::vector<int>{}, HostCopier::default_rules(1));
  Bytes staging = Bytes(4 * kChunk);
  std::unique_ptr<CopyEngine> engine;
};

// Cut into lanes in turn, every third part as if it were not pinned.
std::vector<Piece> pieces_of(Bytes& device, Bytes& host, size_t part) {
  std::vector<Piece> pieces;
  for (size_t at = 0, i = 0; at < host.size(); at += part, ++i) {
    pieces.push_back({reinterpret_cast<uint64_t>(device.data() + at), host.data() + at,
                      std::min(part, host.size() - at), static_cast<Lane>(i % 2), i % 3 != 0});
  }
  return pieces;
}

TEST(many_threads_copy_there_and_back) {
  Fixture f;
  std::atomic<int> wrong = 0;
  std::vector<std::jthread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      for (size_t turn = 0; turn < 30; ++turn) {
        Bytes source = random_bytes(1 + turn * 1777, seed * 100 + turn);
        Bytes device(source.size()), back(source.size());
        const auto there =
            f.engine->submit(Direction::kToDevice, pieces_of(device, source, 2000), {}, true);
        there->stream_wait(50 + seed);
        there->wait();
        const auto home =
            f.engine->submit(Direction::kToHost, pieces_of(device, back, 3000), {50 + seed}, true);
        while (!home->query()) {
          std::this_thread::yield();
          home->wait();
        }
        wrong += back != source;
      }
    });
  }
  threads.clear();
  CHECK_EQ(wrong.load(), 0);
  f.engine->drain();
  CHECK_EQ(f.engine->unfinished_bytes(Direction::kToDevice), 0u);
  f.engine.reset();
  CHECK_EQ(f.driver->counts().events, 0u);
}

TEST(engine_that_goes_finishes_what_was_submitted) {
  Fixture f(1 << 20);
  Bytes source = random_bytes(40 * kChunk, 1), device(40 * kChunk);
  std::vector<std::shared_ptr<CopyHandle>> handles;
  for (size_t at = 0; at < source.size(); at += 10 * kChunk) {
    handles.push_back(
        f.engine->submit(Direction::kToDevice,
                         {{reinterpret_cast<uint64_t>(device.data() + at), source.data() + at,
                           10 * kChunk, 0, at % (20 * kChunk) == 0}},
                         {}, true));
  }
  f.engine.reset();
  for (const auto& handle : handles) CHECK(handle->query());
  CHECK(device == source);
  handles.clear();
  CHECK_EQ(f.driver->counts().events, 0u);
}

TEST(failures_leave_nothing_running_and_no_events) {
  Fixture f;
  Bytes source = random_bytes(6 * kChunk, 2), device(6 * kChunk);
  for (uint64_t nth = 1; nth <= 6; ++nth) {
    f.driver->fail_copy(nth);
    const auto handle =
        f.engine->submit(Direction::kToDevice, pieces_of(device, source, kChunk), {}, true);
    CHECK_THROWS(SystemError, handle->wait());
    for (const gpu::StreamId stream : f.engine->streams()) CHECK_EQ(f.driver->pending(stream), 0u);
    f.driver->fail_copy(nth);
    const auto back =
        f.engine->submit(Direction::kToHost, pieces_of(device, source, kChunk), {}, true);
    CHECK_THROWS(SystemError, back->wait());
  }
  f.driver->fail_copy(0);
  f.engine.reset();
  CHECK_EQ(f.driver->counts().events, 0u);
}

TEST(slots_of_other_transfers_outlive_a_failure) {
  Fixture f;  // two slots a direction
  Bytes near = random_bytes(kChunk, 3), far = random_bytes(2 * kChunk, 4);
  Bytes near_device(kChunk), far_device(2 * kChunk);
  const auto staged = [&](Bytes& device, Bytes& host, Lane lane) {
    const auto to = reinterpret_cast<uint64_t>(device.data());
    return f.engine->submit(Direction::kToDevice, {{to, host.data(), host.size(), lane, false}}, {},
                            true);
  };
  const auto first = staged(near_device, near, 0);
  first->stream_wait(50);  // it is handed to the GPU, and has not run
  f.driver->fail_copy(1);
  CHECK_THROWS(SystemError, staged(far_device, far, 1)->wait());
  staged(far_device, far, 1)->wait();
  first->wait();
  CHECK(near_device == near);
  CHECK(far_device == far);
}

TEST(event_that_cannot_be_recorded_refuses_the_transfer) {
  Fixture f;
  Bytes source(kChunk), device(kChunk);
  f.driver->break_context();
  CHECK_THROWS(SystemError, f.engine->submit(Direction::kToDevice,
                                             pieces_of(device, source, kChunk), {7}, true));
  CHECK_EQ(f.engine->unfinished_bytes(Direction::kToDevice), 0u);
}

}  // namespace
}  // namespace cxl_offload::transfer
