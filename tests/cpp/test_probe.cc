#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <set>
#include <vector>

#include "check.h"
#include "core/cpu_features.h"
#include "core/cpus.h"
#include "core/error.h"
#include "probe/random.h"
#include "probe/traffic.h"

namespace cxl_offload::probe {
namespace {

constexpr size_t kPage = 4096;

// Bytes at a page boundary, as allocations have them.
class Buffer {
 public:
  explicit Buffer(size_t bytes)
      : bytes_(bytes),
        memory_(
            static_cast<std::byte*>(std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage)),
            &std::free) {
    for (size_t i = 0; i < words().size(); ++i) words()[i] = i * 0x9E3779B97F4A7C15u + 1;
  }
  std::span<std::byte> range() { return {memory_.get(), bytes_}; }
  std::span<uint64_t> words() {
    return {reinterpret_cast<uint64_t*>(memory_.get()), bytes_ / sizeof(uint64_t)};
  }

 private:
  size_t bytes_;
  std::unique_ptr<std::byte, void (*)(void*)> memory_;
};

std::vector<uint64_t> copy_of(std::span<const uint64_t> words) {
  return {words.begin(), words.end()};
}

uint64_t sum_of(std::span<const uint64_t> words) {
  uint64_t sum = 0;
  for (uint64_t word : words) sum += word;
  return sum;
}

std::vector<Mix> all_mixes() {
  std::vector<Mix> mixes = {{1, 0, false}};
  for (int reads = 0; reads <= 3; ++reads) {
    mixes.push_back({reads, 1, false});
    if (has_non_temporal_stores()) mixes.push_back({reads, 1, true});
  }
  return mixes;
}

// What one pass over a buffer of `lines` lines a stream must leave, word by word.
std::vector<uint64_t> expected_after(const std::vector<uint64_t>& before, const Mix& mix,
                                     size_t lines, uint64_t value) {
  std::vector<uint64_t> after = before;
  const size_t words = lines * kLineBytes / sizeof(uint64_t);
  for (size_t i = 0; mix.writes > 0 && i < words; ++i) {
    uint64_t sum = mix.reads == 0 ? value : 0;
    for (int k = 0; k < mix.reads; ++k) sum += before[static_cast<size_t>(k) * words + i];
    after[static_cast<size_t>(mix.reads) * words + i] = sum;
  }
  return after;
}

TEST(every_pass_reads_and_writes_exactly_its_lines) {
  for (Isa isa : supported_isas()) {
    for (const Mix& mix : all_mixes()) {
      for (size_t lines : {1, 2, 3, 7, 64, 65, 1000}) {
        Buffer buffer(static_cast<size_t>(mix.lines()) * lines * kLineBytes + kLineBytes);
        const auto before = copy_of(buffer.words());
        const size_t read_words = static_cast<size_t>(mix.reads) * lines * 8;
        const uint64_t sum = stream_pass(mix, isa)(buffer.range().data(), lines * kLineBytes, lines,
                                                   0xABCDEF0123456789u);
        CHECK(copy_of(buffer.words()) == expected_after(before, mix, lines, 0xABCDEF0123456789u));
        CHECK_EQ(sum, sum_of({before.data(), read_words}));
      }
    }
  }
}

TEST(mixes_that_do_not_exist_are_refused) {
  for (const Mix& mix : {Mix{0, 0, false}, Mix{4, 1, false}, Mix{-1, 1, false}, Mix{1, 2, false},
                         Mix{2, 0, false}, Mix{1, 0, true}}) {
    const std::string message = CHECK_THROWS(InvalidArgument, stream_pass(mix, Isa::kScalar));
    CHECK(message.find("mix of") != std::string::npos);
  }
}

TEST(instruction_sets_are_found_by_name_or_refused) {
  for (Isa isa : supported_isas()) CHECK(parse_isa(isa_name(isa)) == isa);
  CHECK(supported_isas().front() == Isa::kScalar);
  const std::string message = CHECK_THROWS(InvalidArgument, parse_isa("sse9"));
  CHECK(message.find("'sse9'") != std::string::npos && message.find("scalar") != std::string::npos);
}

TEST(random_fill_is_the_same_for_any_number_of_threads_and_leaves_no_zeros) {
  const int cpu = allowed_cpus().front();
  Buffer one(10007 * 8), three(10007 * 8);
  fill_random(one.range(), 9, {cpu});
  fill_random(three.range(), 9, {cpu, allowed_cpus().back(), cpu});
  CHECK(copy_of(one.words()) == copy_of(three.words()));
  const auto words = copy_of(one.words());
  CHECK_EQ(std::set<uint64_t>(words.begin(), words.end()).size(), words.size());
  CHECK(std::find(words.begin(), words.end(), 0) == words.end());
  fill_random(three.range(), 10, {cpu});
  CHECK(copy_of(one.words()) != copy_of(three.words()));
  CHECK_THROWS(InvalidArgument, fill_random(one.range().first(12), 1, {cpu}));
}

TEST(random_numbers_are_those_of_the_reference) {
  // The first words of seed 1234567 as the reference implementation prints them.
  Random random(1234567);
  for (uint64_t word : {6457827717110365317u, 3203168211198807973u, 9817491932198370423u}) {
    CHECK_EQ(random.next(), word);
  }
}

// Lines that following the links from the first line visits before it comes back.
std::set<const std::byte*> cycle_from(const std::byte* from) {
  std::set<const std::byte*> seen;
  const std::byte* at = from;
  while (seen.insert(at).second) at = follow(at, 1);
  CHECK(at == from);
  return seen;
}

TEST(linked_cycle_visits_every_line_once) {
  for (size_t lines : {2, 3, 4, 5, 17, 64, 1000, 4099}) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      Buffer buffer(lines * kLineBytes);
      link_cycle(buffer.range(), seed);
      const auto seen = cycle_from(buffer.range().data());
      CHECK_EQ(seen.size(), lines);
      for (const std::byte* line : seen) {
        const auto offset = static_cast<size_t>(line - buffer.range().data());
        CHECK(offset % kLineBytes == 0 && offset < buffer.range().size());
      }
    }
  }
}

TEST(linked_cycle_is_random_and_repeats_with_its_seed) {
  Buffer first(64000), second(64000);
  link_cycle(first.range(), 7);
  link_cycle(second.range(), 7);
  size_t sequential = 0;
  for (size_t line = 0; line < 1000; ++line) {
    const std::byte* at = first.range().data() + line * kLineBytes;
    const auto* other = second.range().data() + line * kLineBytes;
    CHECK(follow(at, 1) - first.range().data() == follow(other, 1) - second.range().data());
    if (follow(at, 1) == at + kLineBytes) ++sequential;
  }
  CHECK(sequential < 20);  // one is to be expected, and chance gives 20 once in 10^18 runs
  const auto with_seven = copy_of(first.words());
  link_cycle(first.range(), 8);
  CHECK(copy_of(first.words()) != with_seven);
}

TEST(buffers_that_cannot_be_linked_are_refused) {
  Buffer buffer(4 * kLineBytes);
  for (auto range : {buffer.range().first(kLineBytes), buffer.range().first(3 * kLineBytes - 8),
                     buffer.range().subspan(8, 2 * kLineBytes), std::span<std::byte>()}) {
    CHECK_THROWS(InvalidArgument, link_cycle(range, 1));
  }
}

TEST(chase_counts_its_loads_and_ends_in_time) {
  Buffer buffer(1000 * kLineBytes);
  link_cycle(buffer.range(), 3);
  const auto start = Clock::now();
  const ChaseResult result = chase(buffer.range().data(), 100, start, {0.001, 0.004});
  const double seconds = seconds_between(start, Clock::now());
  CHECK(seconds >= 0.005);
  CHECK_EQ(result.loads, 100 * result.ns_per_load.size());
  double total_ns = 0;
  for (double ns : result.ns_per_load) total_ns += ns * 100;
  CHECK(total_ns > 0 && total_ns <= (seconds - 0.001) * 1e9);
}

TEST(chase_of_no_time_still_measures_once) {
  Buffer buffer(10 * kLineBytes);
  link_cycle(buffer.range(), 3);
  const auto result = idle_latency(buffer.range(), allowed_cpus().front(), 50, {0, 0});
  CHECK_EQ(result.loads, 50u);
  CHECK_EQ(result.ns_per_load.size(), 1u);
  CHECK(result.ns_per_load.front() > 0);
}

TEST(slices_do_not_overlap_and_stay_inside) {
  for (size_t bytes : {64u, 640u, 4096u, 100000u, 1u << 20, 5u << 20}) {
    Buffer buffer(bytes);
    for (const Mix& mix : all_mixes()) {
      for (size_t threads = 1; threads <= 7; ++threads) {
        const size_t streams = threads * static_cast<size_t>(mix.lines());
        if (bytes / kLineBytes < streams) {
          CHECK_THROWS(InvalidArgument, cut_slices(buffer.range(), mix, threads));
          continue;
        }
        const std::byte* free = buffer.range().data();
        for (const Slice& slice : cut_slices(buffer.range(), mix, threads)) {
          CHECK(slice.base >= free && slice.lines > 0);
          CHECK_EQ(slice.stride_bytes, slice.lines * kLineBytes);
          free = slice.base + static_cast<size_t>(mix.lines()) * slice.stride_bytes;
        }
        CHECK(free <= buffer.range().data() + bytes);
      }
    }
  }
}

TEST(streams_of_large_slices_start_at_different_offsets_in_a_page) {
  Buffer buffer(8 << 20);
  const Slice slice = cut_slices(buffer.range(), {3, 1, false}, 2)[0];
  std::set<size_t> offsets;
  for (size_t k = 0; k < 4; ++k) offsets.insert(k * slice.stride_bytes % kPage);
  CHECK_EQ(offsets.size(), 4u);
  CHECK(4 * slice.stride_bytes > (4u << 20) - 4 * 2 * kPage);  // little is left out
}

TEST(counted_passes_move_exactly_what_they_say) {
  const std::vector<int> allowed = allowed_cpus();
  const std::vector<int> cpus = {allowed.front(), allowed.back(), allowed.front()};
  for (const Mix& mix : all_mixes()) {
    constexpr size_t kLines = 2500;  // more than a burst, and not a multiple of it
    const auto streams = static_cast<size_t>(mix.lines());
    Buffer buffer(cpus.size() * streams * kLines * kLineBytes);
    const auto before = copy_of(buffer.words());
    Traffic traffic{mix, best_isa(), 42, 0, 3};
    const auto done = run_traffic(buffer.range(), traffic, cpus, {});
    CHECK_EQ(done.size(), cpus.size());
    const size_t words = streams * kLines * 8;
    for (size_t i = 0; i < done.size(); ++i) {
      CHECK_EQ(done[i].bytes_read, 3u * kLines * kLineBytes * static_cast<size_t>(mix.reads));
      CHECK_EQ(done[i].bytes_written, 3u * kLines * kLineBytes * static_cast<size_t>(mix.writes));
      const std::vector<uint64_t> own(before.begin() + static_cast<ptrdiff_t>(i * words),
                                      before.begin() + static_cast<ptrdiff_t>((i + 1) * words));
      const auto after = copy_of(buffer.words().subspan(i * words, words));
      CHECK(after == expected_after(own, mix, kLines, 42));
      const size_t read_words = static_cast<size_t>(mix.reads) * kLines * 8;
      CHECK_EQ(done[i].sum, 3 * sum_of({own.data(), read_words}));
    }
  }
}

TEST(timed_traffic_lasts_its_window_and_counts_no_warm_up) {
  Buffer buffer(1 << 20);
  const auto start = Clock::now();
  const auto done = run_traffic(buffer.range(), {{1, 0, false}, best_isa(), 0, 0, 0},
                                {allowed_cpus().front()}, {0.004, 0.006});
  CHECK(seconds_between(start, Clock::now()) >= 0.0099);
  CHECK(done[0].seconds <= seconds_between(start, Clock::now()) - 0.0039);
  CHECK(done[0].bytes_read > 0 && done[0].bytes_written == 0);
}

TEST(threads_that_share_a_cpu_say_that_they_did_not_run_all_the_time) {
  Buffer buffer(1 << 20);
  const int cpu = allowed_cpus().front();
  const auto done =
      run_traffic(buffer.range(), {{1, 0, false}, best_isa(), 0, 0, 0}, {cpu, cpu, cpu}, {0, 0.06});
  double cpu_seconds = 0, seconds = 0;
  for (const auto& thread : done) {
    CHECK(thread.cpu_seconds > 0);
    cpu_seconds += thread.cpu_seconds;
    seconds += thread.seconds;
  }
  CHECK(cpu_seconds < 0.6 * seconds);  // a third, and what the clocks differ by
}

TEST(threads_run_where_they_are_told) {
  Buffer buffer(1 << 16);
  for (int cpu : allowed_cpus()) {
    const auto done =
        run_traffic(buffer.range(), {{1, 0, false}, Isa::kScalar, 0, 0, 1}, {cpu, cpu}, {});
    for (const auto& thread : done) CHECK_EQ(thread.cpu, cpu);
  }
}

TEST(pinning_leaves_the_calling_thread_alone) {
  const auto before = allowed_cpus();
  run_team({before.back()}, [](size_t, Clock::time_point) {});
  CHECK(allowed_cpus() == before);
}

TEST(cpus_that_are_not_allowed_are_refused_before_anything_runs) {
  for (int cpu : {-1, 1 << 19}) {
    bool ran = false;
    const std::string message = CHECK_THROWS(
        InvalidArgument,
        run_team({allowed_cpus().front(), cpu}, [&](size_t, Clock::time_point) { ran = true; }));
    CHECK(!ran && message.find("CPU " + std::to_string(cpu)) != std::string::npos);
  }
  CHECK_THROWS(InvalidArgument, run_team({}, [](size_t, Clock::time_point) {}));
}

TEST(an_exception_in_a_team_reaches_the_caller) {
  const int cpu = allowed_cpus().front();
  CHECK_THROWS(OutOfMemory, run_team({cpu, cpu}, [](size_t index, Clock::time_point) {
                 if (index == 1) throw OutOfMemory("one of two");
               }));
}

TEST(delays_slow_traffic_down) {
  Buffer buffer(1 << 20);
  const auto bytes_with = [&](uint64_t delay_ns) {
    return run_traffic(buffer.range(), {{1, 0, false}, best_isa(), 0, delay_ns, 0},
                       {allowed_cpus().front()}, {0.001, 0.01})[0]
        .bytes_read;
  };
  // A burst of 4 KiB a millisecond: about ten, where full speed gives tens of thousands, unless
  // other work takes the CPU for the whole window.
  CHECK(bytes_with(1'000'000) <= 12 * 4096);
  uint64_t best = 0;
  for (int attempt = 0; attempt < 20 && best <= 100 * 4096; ++attempt) {
    best = std::max(best, bytes_with(0));
  }
  CHECK(best > 100 * 4096);
}

TEST(loaded_latency_measures_both_sides_in_one_window) {
  Buffer linked(1000 * kLineBytes), buffer(1 << 20);
  link_cycle(linked.range(), 5);
  const int first = allowed_cpus().front(), last = allowed_cpus().back();
  const Traffic traffic{{2, 1, false}, best_isa(), 0, 100, 0};
  const auto result =
      run_loaded(linked.range(), first, 64, buffer.range(), traffic, {last}, {0.002, 0.01});
  CHECK(result.chase.loads > 0 && result.traffic.size() == 1);
  CHECK_EQ(result.traffic[0].bytes_read, 2 * result.traffic[0].bytes_written);
  CHECK(result.traffic[0].bytes_written > 0);
  Traffic counted = traffic;
  counted.passes = 1;
  CHECK_THROWS(InvalidArgument,
               run_loaded(linked.range(), first, 64, buffer.range(), counted, {last}, {0, 0.01}));
}

TEST(windows_that_cannot_be_are_refused) {
  for (const Window& window :
       {Window{0, -1}, Window{-0.1, 1}, Window{0, 1e9}, Window{0, std::nan("")}}) {
    CHECK_THROWS(InvalidArgument, check_window(window));
  }
}

}  // namespace
}  // namespace cxl_offload::probe
