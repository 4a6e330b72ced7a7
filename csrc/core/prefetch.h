// Prefetches a line of the memory into a cache. No address is wrong: what cannot be read is not.
//
// Everything prefetches by these functions. To GCC a function that only prefetches does nothing,
// and it drops calls that it has not inlined early: all prefetches of rows into the second cache
// were missing from attention. Assembly, even none, is something that a function does.
#ifndef CXL_OFFLOAD_CORE_PREFETCH_H_
#define CXL_OFFLOAD_CORE_PREFETCH_H_

namespace cxl_offload {

// Into the nearest cache.
inline __attribute__((always_inline)) void prefetch_near(const void* at) {
  asm volatile("");
  __builtin_prefetch(at, 0, 3);
}

// Into the second cache. The nearest one has fewer places for lines that are on their way. When all
// are taken, a thread waits for one and computes nothing meanwhile.
inline __attribute__((always_inline)) void prefetch_second(const void* at) {
  asm volatile("");
  __builtin_prefetch(at, 0, 2);
}

// With kNone the processor finds what comes next by itself.
enum class Prefetch { kNearest, kSecond, kNone };

template <Prefetch kInto>
inline __attribute__((always_inline)) void prefetch_into(const void* at) {
  if constexpr (kInto == Prefetch::kNearest) prefetch_near(at);
  if constexpr (kInto == Prefetch::kSecond) prefetch_second(at);
}

// For one use: other lines should not leave the caches for it.
inline __attribute__((always_inline)) void prefetch_once(const void* at) {
  asm volatile("");
  __builtin_prefetch(at, 0, 0);
}

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_PREFETCH_H_
