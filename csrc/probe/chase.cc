#include "probe/chase.h"

#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "core/error.h"
#include "probe/random.h"
#include "probe/stream.h"

namespace cxl_offload::probe {
namespace {

// Latencies come in batches of a few microseconds at least; this bounds the answer's memory.
constexpr size_t kMaxSamples = size_t{1} << 20;

void check_linkable(std::span<const std::byte> buffer) {
  const bool aligned = reinterpret_cast<uintptr_t>(buffer.data()) % kLineBytes == 0;
  const size_t lines = buffer.size() / kLineBytes;
  if (aligned && buffer.size() % kLineBytes == 0 && lines >= 2 &&
      lines <= std::numeric_limits<uint32_t>::max()) {
    return;
  }
  throw InvalidArgument("link a cycle through " + format_bytes(buffer.size()) +
                        ": needs whole lines of 64 bytes at a multiple of 64, two to 2^32 - 1");
}

}  // namespace

void link_cycle(std::span<std::byte> buffer, uint64_t seed) {
  check_linkable(buffer);
  std::vector<uint32_t> order(buffer.size() / kLineBytes);
  std::iota(order.begin(), order.end(), 0u);
  Random random(seed);
  for (size_t i = order.size() - 1; i > 0; --i) {
    // This is the shuffle of Fisher and Yates, which makes every order as likely.
    std::swap(order[i], order[random.below(i + 1)]);
  }
  const auto line = [&](size_t i) { return buffer.data() + order[i] * kLineBytes; };
  for (size_t i = 0; i < order.size(); ++i) {
    const std::byte* next = line(i + 1 == order.size() ? 0 : i + 1);
    std::memcpy(line(i), &next, sizeof(next));
  }
}

const std::byte* follow(const std::byte* from, size_t steps) {
  const auto* at = reinterpret_cast<const std::byte* const*>(from);
  for (size_t i = 0; i < steps; ++i) at = reinterpret_cast<const std::byte* const*>(*at);
  return reinterpret_cast<const std::byte*>(at);
}

ChaseResult chase(const std::byte* from, size_t batch, Clock::time_point start,
                  const Window& window) {
  check_window(window);
  if (batch == 0) throw InvalidArgument("chase in batches of 0 loads: give at least 1");
  const std::byte* at = from;
  const auto warm = start + from_seconds(window.warmup_s);
  while (Clock::now() < warm) at = follow(at, batch);
  const auto end = warm + from_seconds(window.seconds);
  ChaseResult result;
  auto before = Clock::now();
  do {
    at = follow(at, batch);
    const auto now = Clock::now();
    const double ns = seconds_between(before, now) * 1e9;
    if (result.ns_per_load.size() < kMaxSamples) {
      result.ns_per_load.push_back(ns / static_cast<double>(batch));
    }
    result.loads += batch;
    before = now;
  } while (before < end);
  // The address has to be used. Otherwise the compiler may drop the loads.
  if (at == nullptr) throw InvalidArgument("chase through a buffer that is not linked");
  return result;
}

ChaseResult idle_latency(std::span<const std::byte> linked, int cpu, size_t batch,
                         const Window& window) {
  check_linkable(linked);
  check_window(window);
  ChaseResult result;
  run_team({cpu}, [&](size_t, Clock::time_point start) {
    result = chase(linked.data(), batch, start, window);
  });
  return result;
}

}  // namespace cxl_offload::probe
