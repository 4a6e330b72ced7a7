// One of several ways of doing the same work, chosen by how long the first pieces of it take.
//
// Ways of reading memory are chosen like this, because what is best depends on the processor and on
// how fast its memory is at the time.
#ifndef CXL_OFFLOAD_KERNELS_MEASURED_CHOICE_H_
#define CXL_OFFLOAD_KERNELS_MEASURED_CHOICE_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>

namespace cxl_offload::kernels {

// The first way is taken unless another is clearly faster. Where threads read memory at the same
// time, a piece that is all of their work is read as it will be when the choice is made: all of
// them in one way.
//
// kTrials is how often each way is tried. Any thread may call this at any time. It takes no lock,
// so a child of a fork may go on with it.
template <size_t kWays, size_t kTrials = 32>
class MeasuredChoice {
 public:
  // Calls work(way) with the way that is chosen. While none is, pieces of at least `least_size`
  // take the ways in turns and are timed; others take the first way.
  template <class Work>
  void run(size_t size, size_t least_size, const Work& work) {
    using Clock = std::chrono::steady_clock;
    if (size < least_size || !is_open()) return work(way());
    const size_t tried = turn();
    const auto begin = Clock::now();
    work(tried);
    const std::chrono::duration<float> taken = Clock::now() - begin;
    note(tried, taken.count() / static_cast<float>(size));
  }

  // The way that is chosen, or the first one.
  size_t way() const {
    const size_t chosen = chosen_.load(std::memory_order_relaxed);
    return chosen == kOpen ? 0 : chosen - 1;
  }
  // The way that a trial takes: each once in kWays trials. Pieces of work may differ and come in a
  // period, as the layers of a model do, so the order has none: the sum of the digits of the
  // trial's number (for two ways, the sequence of Thue and Morse).
  size_t turn() {
    size_t sum = 0;
    for (size_t left = turn_.fetch_add(1, std::memory_order_relaxed); left > 0; left /= kWays) {
      sum += left % kWays;
    }
    return sum % kWays;
  }

  bool is_open() const { return chosen_.load(std::memory_order_relaxed) == kOpen; }

  // Says how long a piece took for its size. The last of all trials makes the choice.
  void note(size_t way, float seconds) {
    Trials& trials = trials_[way];
    const size_t number = trials.begun.fetch_add(1, std::memory_order_relaxed);
    if (number >= kTrials) return;
    trials.seconds[number].store(seconds, std::memory_order_relaxed);
    trials.done.fetch_add(1, std::memory_order_release);
    const bool all = std::ranges::all_of(trials_, [](const Trials& each) {
      return each.done.load(std::memory_order_acquire) == kTrials;
    });
    if (all) chosen_.store(best() + 1, std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kOpen = 0;
  static constexpr float kClearly = 0.98f;

  struct Trials {
    std::array<std::atomic<float>, kTrials> seconds{};
    std::atomic<size_t> begun = 0;
    std::atomic<size_t> done = 0;

    float median() const {
      std::array<float, kTrials> sorted;
      std::ranges::transform(seconds, sorted.begin(),
                             [](const auto& each) { return each.load(std::memory_order_relaxed); });
      std::ranges::nth_element(sorted, sorted.begin() + kTrials / 2);
      return sorted[kTrials / 2];
    }
  };

  size_t best() const {
    size_t found = 0;
    float least = kClearly * trials_[0].median();
    for (size_t way = 1; way < kWays; ++way) {
      const float median = trials_[way].median();
      if (median >= least) continue;
      least = median;
      found = way;
    }
    return found;
  }

  std::atomic<size_t> chosen_ = kOpen;  // else one more than the choice
  std::atomic<size_t> turn_ = 0;
  std::array<Trials, kWays> trials_;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_MEASURED_CHOICE_H_
