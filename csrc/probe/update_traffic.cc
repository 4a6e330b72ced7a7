#include "probe/update_traffic.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/error.h"
#include "core/prefetch.h"
#include "probe/stream.h"
#include "probe/team.h"

#if CXL_OFFLOAD_X86
#include <immintrin.h>
#endif

namespace cxl_offload::probe {
namespace {

constexpr size_t kMostStreams = 8;

struct Part {
  std::vector<TrafficStream> streams;  // bases moved to the first block of the part
  size_t blocks = 0;
  size_t ahead_bytes = 0;
};

inline __attribute__((always_inline)) void fetch(const std::byte* at, const Part& part) {
  if (part.ahead_bytes > 0) prefetch_near(at + part.ahead_bytes);
}

uint64_t pass_scalar(const Part& part) {
  uint64_t seen = 0;
  for (size_t block = 0; block < part.blocks; ++block) {
    for (const TrafficStream& stream : part.streams) {
      for (size_t line = 0; line < stream.lines; ++line) {
        std::byte* at = stream.base + (block * stream.lines + line) * kLineBytes;
        fetch(at, part);
        auto* words = reinterpret_cast<uint64_t*>(at);
        for (size_t w = 0; w < kLineWords; ++w) {
          if (stream.written) {
            words[w] ^= seen;
          } else {
            seen ^= words[w];
          }
        }
      }
    }
  }
  return seen;
}

#if CXL_OFFLOAD_X86

CXL_OFFLOAD_TARGET_AVX2 uint64_t pass_avx2(const Part& part) {
  __m256i seen = _mm256_setzero_si256();
  for (size_t block = 0; block < part.blocks; ++block) {
    for (const TrafficStream& stream : part.streams) {
      std::byte* base = stream.base + block * stream.lines * kLineBytes;
      for (size_t half = 0; half < 2 * stream.lines; ++half) {
        auto* at = reinterpret_cast<__m256i*>(base) + half;
        if (half % 2 == 0) fetch(reinterpret_cast<const std::byte*>(at), part);
        const __m256i value = _mm256_load_si256(at);
        if (stream.written) {
          _mm256_store_si256(at, _mm256_xor_si256(value, seen));
        } else {
          seen = _mm256_xor_si256(seen, value);
        }
      }
    }
  }
  return static_cast<uint64_t>(_mm256_extract_epi64(seen, 0));
}

CXL_OFFLOAD_TARGET_AVX512 uint64_t pass_avx512(const Part& part) {
  __m512i seen = _mm512_setzero_si512();
  for (size_t block = 0; block < part.blocks; ++block) {
    for (const TrafficStream& stream : part.streams) {
      std::byte* base = stream.base + block * stream.lines * kLineBytes;
      for (size_t line = 0; line < stream.lines; ++line) {
        std::byte* at = base + line * kLineBytes;
        fetch(at, part);
        const __m512i value = _mm512_load_si512(at);
        if (stream.written) {
          _mm512_store_si512(at, _mm512_xor_si512(value, seen));
        } else {
          seen = _mm512_xor_si512(seen, value);
        }
      }
    }
  }
  std::array<uint64_t, kLineWords> words;
  _mm512_storeu_si512(words.data(), seen);
  return words[0];
}

#endif  // CXL_OFFLOAD_X86

using TrafficPass = uint64_t (*)(const Part& part);

TrafficPass choose(Isa isa) {
#if CXL_OFFLOAD_X86
  if (isa == Isa::kAvx512) return &pass_avx512;
  if (isa == Isa::kAvx2) return &pass_avx2;
#endif
  static_cast<void>(isa);
  return &pass_scalar;
}

void check_streams(const std::vector<TrafficStream>& streams) {
  if (streams.empty() || streams.size() > kMostStreams) {
    throw InvalidArgument("update traffic over " + std::to_string(streams.size()) +
                          " streams; give 1 to 8");
  }
  for (const TrafficStream& stream : streams) {
    const bool aligned = reinterpret_cast<uintptr_t>(stream.base) % kLineBytes == 0;
    if (aligned && (stream.lines == 1 || stream.lines == 2)) continue;
    throw InvalidArgument(
        "update traffic: streams begin at a multiple of 64 bytes and have 1 or 2 lines a block");
  }
}

}  // namespace

double update_traffic(const std::vector<TrafficStream>& streams, size_t blocks,
                      const std::vector<int>& cpus, size_t ahead_bytes, Isa isa) {
  check_streams(streams);
  const TrafficPass pass = choose(isa);
  std::vector<Clock::duration> took(cpus.size());
  std::vector<uint64_t> seen(cpus.size());
  run_team(cpus, [&](size_t index, Clock::time_point start) {
    const size_t begin = blocks * index / cpus.size();
    Part part{streams, blocks * (index + 1) / cpus.size() - begin, ahead_bytes};
    for (TrafficStream& stream : part.streams) stream.base += begin * stream.lines * kLineBytes;
    seen[index] = pass(part);  // kept, so that no load can be left out
    took[index] = Clock::now() - start;
  });
  return std::chrono::duration<double>(std::ranges::max(took)).count();
}

}  // namespace cxl_offload::probe
