#include "probe/stream.h"

#include <array>
#include <string>

#include "core/error.h"

#if CXL_OFFLOAD_X86
#include <immintrin.h>
#endif

namespace cxl_offload::probe {
namespace {

// Keeps the accesses of every iteration. Without it, the compiler would turn the loops into memset
// and memcpy, which choose their own instructions, or drop stores that the next pass overwrites.
inline __attribute__((always_inline)) void keep_accesses() { asm volatile("" ::: "memory"); }

inline void wait_for_stores() {
#if CXL_OFFLOAD_X86
  _mm_sfence();
#endif
}

template <size_t kParts>
uint64_t add_up(const std::array<uint64_t, kParts>& parts) {
  uint64_t sum = 0;
  for (uint64_t part : parts) sum += part;
  return sum;
}

template <bool kNonTemporal>
inline __attribute__((always_inline)) void store_word(uint64_t* at, uint64_t word) {
#if CXL_OFFLOAD_X86
  if constexpr (kNonTemporal) {
    _mm_stream_si64(reinterpret_cast<long long*>(at), static_cast<long long>(word));
    return;
  }
#endif
  *at = word;
}

template <int kReads, bool kWrites, bool kNonTemporal>
uint64_t pass_scalar(std::byte* base, size_t stride_bytes, size_t lines, uint64_t value) {
  std::array<uint64_t, kLineWords> sums{};
  for (size_t i = 0; i < lines; ++i) {
    std::byte* at = base + i * kLineBytes;
    std::array<uint64_t, kLineWords> line;
    line.fill(kReads == 0 ? value : 0);
    for (int k = 0; k < kReads; ++k, at += stride_bytes) {
      const auto* words = reinterpret_cast<const uint64_t*>(at);
      for (size_t w = 0; w < kLineWords; ++w) line[w] += words[w];
    }
    if constexpr (kWrites) {
      auto* words = reinterpret_cast<uint64_t*>(at);
      for (size_t w = 0; w < kLineWords; ++w) store_word<kNonTemporal>(words + w, line[w]);
    }
    if constexpr (kReads > 0) {
      for (size_t w = 0; w < kLineWords; ++w) sums[w] += line[w];
    }
    keep_accesses();
  }
  if constexpr (kNonTemporal) wait_for_stores();
  return add_up(sums);
}

#if CXL_OFFLOAD_X86

template <int kReads, bool kWrites, bool kNonTemporal>
CXL_OFFLOAD_TARGET_AVX2 uint64_t pass_avx2(std::byte* base, size_t stride_bytes, size_t lines,
                                           uint64_t value) {
  const __m256i fill = _mm256_set1_epi64x(static_cast<long long>(kReads == 0 ? value : 0));
  __m256i low_sum = _mm256_setzero_si256();
  __m256i high_sum = _mm256_setzero_si256();
  for (size_t i = 0; i < lines; ++i) {
    auto* at = reinterpret_cast<__m256i*>(base + i * kLineBytes);
    __m256i low = fill;
    __m256i high = fill;
    for (int k = 0; k < kReads; ++k, at += stride_bytes / sizeof(*at)) {
      low = _mm256_add_epi64(low, _mm256_load_si256(at));
      high = _mm256_add_epi64(high, _mm256_load_si256(at + 1));
    }
    if constexpr (kWrites && kNonTemporal) {
      _mm256_stream_si256(at, low);
      _mm256_stream_si256(at + 1, high);
    } else if constexpr (kWrites) {
      _mm256_store_si256(at, low);
      _mm256_store_si256(at + 1, high);
    }
    if constexpr (kReads > 0) {
      low_sum = _mm256_add_epi64(low_sum, low);
      high_sum = _mm256_add_epi64(high_sum, high);
    }
    keep_accesses();
  }
  if constexpr (kNonTemporal) wait_for_stores();
  std::array<uint64_t, 4> parts;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts.data()),
                      _mm256_add_epi64(low_sum, high_sum));
  return add_up(parts);
}

template <int kReads, bool kWrites, bool kNonTemporal>
CXL_OFFLOAD_TARGET_AVX512 uint64_t pass_avx512(std::byte* base, size_t stride_bytes, size_t lines,
                                               uint64_t value) {
  const __m512i fill = _mm512_set1_epi64(static_cast<long long>(kReads == 0 ? value : 0));
  __m512i sum = _mm512_setzero_si512();
  for (size_t i = 0; i < lines; ++i) {
    std::byte* at = base + i * kLineBytes;
    __m512i line = fill;
    for (int k = 0; k < kReads; ++k, at += stride_bytes) {
      line = _mm512_add_epi64(line, _mm512_load_si512(at));
    }
    if constexpr (kWrites && kNonTemporal) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(at), line);
    } else if constexpr (kWrites) {
      _mm512_store_si512(at, line);
    }
    if constexpr (kReads > 0) sum = _mm512_add_epi64(sum, line);
    keep_accesses();
  }
  if constexpr (kNonTemporal) wait_for_stores();
  std::array<uint64_t, kLineWords> parts;
  _mm512_storeu_si512(parts.data(), sum);
  return add_up(parts);
}

#endif  // CXL_OFFLOAD_X86

template <int kReads, bool kWrites, bool kNonTemporal>
StreamPass pass_for(Isa isa) {
#if CXL_OFFLOAD_X86
  if (isa == Isa::kAvx512) return &pass_avx512<kReads, kWrites, kNonTemporal>;
  if (isa == Isa::kAvx2) return &pass_avx2<kReads, kWrites, kNonTemporal>;
#endif
  static_cast<void>(isa);
  return &pass_scalar<kReads, kWrites, kNonTemporal>;
}

template <bool kNonTemporal>
StreamPass writing_pass(int reads, Isa isa) {
  switch (reads) {
    case 0:
      return pass_for<0, true, kNonTemporal>(isa);
    case 1:
      return pass_for<1, true, kNonTemporal>(isa);
    case 2:
      return pass_for<2, true, kNonTemporal>(isa);
    default:
      return pass_for<3, true, kNonTemporal>(isa);
  }
}

}  // namespace

bool has_non_temporal_stores() { return CXL_OFFLOAD_X86 != 0; }

StreamPass stream_pass(const Mix& mix, Isa isa) {
  if (mix == Mix{1, 0, false}) return pass_for<1, false, false>(isa);
  if (mix.reads < 0 || mix.reads > 3 || mix.writes != 1) {
    throw InvalidArgument("a mix of " + std::to_string(mix.reads) + " reads to " +
                          std::to_string(mix.writes) +
                          " writes; known are 1:0 (cached) and 0:1, 1:1, 2:1, 3:1");
  }
  if (!mix.non_temporal) return writing_pass<false>(mix.reads, isa);
  if (!has_non_temporal_stores()) {
    throw InvalidArgument(
        "non-temporal stores: this architecture's build has none; measure cached stores");
  }
  return writing_pass<true>(mix.reads, isa);
}

}  // namespace cxl_offload::probe
