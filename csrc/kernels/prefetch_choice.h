// How far ahead an update fetches its streams, chosen by its first chunks.
//
// What is best depends on the processor and on how fast its memory is at the time: on one machine
// 1024 elements were 6 % slower than none while memory was fast, and no different an hour later.
#ifndef CXL_OFFLOAD_KERNELS_PREFETCH_CHOICE_H_
#define CXL_OFFLOAD_KERNELS_PREFETCH_CHOICE_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>

namespace cxl_offload::kernels {

// Distances in elements. The first one is taken unless another is clearly faster.
inline constexpr std::array<size_t, 3> kPrefetchDistances = {256, 0, 1024};

// Any thread may call this at any time; it takes no lock, so a child of a fork may go on with it.
class PrefetchChoice {
 public:
  // Returns which distance the next chunk takes.
  size_t next() {
    const size_t chosen = chosen_.load(std::memory_order_relaxed);
    if (chosen != kOpen) return chosen - 1;
    return turn_.fetch_add(1, std::memory_order_relaxed) % kPrefetchDistances.size();
  }

  bool is_open() const { return chosen_.load(std::memory_order_relaxed) == kOpen; }

  // Says how long a chunk took that had this distance. The last of all trials makes the choice.
  void note(size_t which, float seconds_of_an_element) {
    Trials& trials = trials_[which];
    const size_t number = trials.begun.fetch_add(1, std::memory_order_relaxed);
    if (number >= kTrials) return;
    trials.seconds[number].store(seconds_of_an_element, std::memory_order_relaxed);
    trials.done.fetch_add(1, std::memory_order_release);
    const bool all = std::ranges::all_of(trials_, [](const Trials& each) {
      return each.done.load(std::memory_order_acquire) == kTrials;
    });
    if (all) chosen_.store(best() + 1, std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kOpen = 0;
  static constexpr size_t kTrials = 32;
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
    for (size_t which = 1; which < kPrefetchDistances.size(); ++which) {
      const float median = trials_[which].median();
      if (median >= least) continue;
      least = median;
      found = which;
    }
    return found;
  }

  std::atomic<size_t> chosen_ = kOpen;  // else one more than the choice
  std::atomic<size_t> turn_ = 0;
  std::array<Trials, kPrefetchDistances.size()> trials_;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_PREFETCH_CHOICE_H_
