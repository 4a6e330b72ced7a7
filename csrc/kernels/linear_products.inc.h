// How fast products are added to sums that stay in registers, which no loop can exceed. The sources
// of linear layers include this file inside of an unnamed namespace, after vector/*.inc.h.

// Returns how many products a second one thread adds, measured in some 50 us. `add(sum, one)` adds
// kProducts of them to one of several sums, which do not wait for each other.
template <size_t kProducts, class Add>
CXL_OFFLOAD_VECTOR double rate_of(const Add& add) {
  constexpr size_t kSums = 12, kTimes = 256, kRounds = 32;
  volatile float kept = 0;  // so that a compiler knows none of the numbers
  const Vector one = Vector::all(kept);
  Vector sums[kSums];
#pragma GCC unroll 12
  for (size_t i = 0; i < kSums; ++i) sums[i] = Vector::all(kept);
  double least = std::numeric_limits<double>::infinity();
  for (size_t round = 0; round < kRounds; ++round) {  // other work only makes a round longer
    const auto begin = std::chrono::steady_clock::now();
    for (size_t time = 0; time < kTimes; ++time) {
#pragma GCC unroll 12
      for (size_t i = 0; i < kSums; ++i) add(sums[i], one);
    }
    Vector all = sums[0];
#pragma GCC unroll 12
    for (size_t i = 1; i < kSums; ++i) all = mul_add(sums[i], one, all);
    kept = all.total();  // so the sums are there before the clock is read
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    least = std::min(least, taken.count());
  }
  return static_cast<double>(kProducts * kSums * kTimes) / least;
}
