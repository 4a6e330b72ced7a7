#include "transfer/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/prefetch.h"
#include "core/sizes.h"

#if CXL_OFFLOAD_X86
#include <immintrin.h>
#endif

namespace cxl_offload::transfer {
namespace {

void plain(std::byte* target, const std::byte* source, size_t bytes) {
  std::memcpy(target, source, bytes);
}

#if CXL_OFFLOAD_X86

// How far ahead of their copy lines are prefetched.
constexpr size_t kAhead = 16 * kLineBytes;

// Copies the bytes up to the target's next line, so that whole lines follow. Returns how many they
// are.
size_t copy_head(std::byte* target, const std::byte* source, size_t bytes) {
  const size_t into = reinterpret_cast<uintptr_t>(target) % kLineBytes;
  const size_t head = into == 0 ? 0 : std::min(bytes, kLineBytes - into);
  std::memcpy(target, source, head);
  return head;
}

inline void prefetch(const std::byte* source) { prefetch_once(source + kAhead); }

CXL_OFFLOAD_TARGET_AVX512 void copy_avx512(std::byte* target, const std::byte* source,
                                           size_t bytes) {
  size_t at = copy_head(target, source, bytes);
  for (; at + 4 * kLineBytes <= bytes; at += 4 * kLineBytes) {
    __m512i held[4];
    for (size_t i = 0; i < 4; ++i) {
      prefetch(source + at + i * kLineBytes);
      held[i] = _mm512_loadu_si512(source + at + i * kLineBytes);
    }
    for (size_t i = 0; i < 4; ++i) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at + i * kLineBytes), held[i]);
    }
  }
  _mm_sfence();
  std::memcpy(target + at, source + at, bytes - at);
}

CXL_OFFLOAD_TARGET_AVX2 void copy_avx2(std::byte* target, const std::byte* source, size_t bytes) {
  size_t at = copy_head(target, source, bytes);
  for (; at + 2 * kLineBytes <= bytes; at += 2 * kLineBytes) {
    __m256i held[4];
    prefetch(source + at);
    prefetch(source + at + kLineBytes);
    for (size_t i = 0; i < 4; ++i) {
      held[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at) + i);
    }
    for (size_t i = 0; i < 4; ++i) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at) + i, held[i]);
    }
  }
  _mm_sfence();
  std::memcpy(target + at, source + at, bytes - at);
}

void copy_sse2(std::byte* target, const std::byte* source, size_t bytes) {
  size_t at = copy_head(target, source, bytes);
  for (; at + kLineBytes <= bytes; at += kLineBytes) {
    __m128i held[4];
    prefetch(source + at);
    for (size_t i = 0; i < 4; ++i) {
      held[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at) + i);
    }
    for (size_t i = 0; i < 4; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + at) + i, held[i]);
    }
  }
  _mm_sfence();
  std::memcpy(target + at, source + at, bytes - at);
}

#endif

}  // namespace

StreamCopy stream_copy(Isa isa) {
#if CXL_OFFLOAD_X86
  switch (isa) {
    case Isa::kAvx512:
      return copy_avx512;
    case Isa::kAvx2:
      return copy_avx2;
    case Isa::kSve256:
    case Isa::kNeon:
    case Isa::kScalar:
      return copy_sse2;
  }
#endif
  (void)isa;
  return plain;
}

}  // namespace cxl_offload::transfer
