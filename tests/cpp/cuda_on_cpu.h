// As much of CUDA as the kernels of csrc/gpu use, on the CPU: a warp is 32 threads that meet at
// every exchange of values. What is not shown by it: speed, and accesses that only a GPU forbids.
// The conversions are written apart from those of csrc/transfer, so that each checks the other.
#ifndef CXL_OFFLOAD_TESTS_CUDA_ON_CPU_H_
#define CXL_OFFLOAD_TESTS_CUDA_ON_CPU_H_

#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define CUDART_VERSION 0
#define CXL_OFFLOAD_UNROLL

using cudaStream_t = void*;
using cudaError_t = int;
inline constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1;
inline int cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(int) { return "invalid argument"; }

struct Index {
  unsigned x = 0;
};
inline thread_local Index threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct __half_raw {
  uint16_t x;
};
struct __half {
  __half() = default;
  explicit __half(_Float16 half) : value(half) {}
  explicit __half(__half_raw raw) : value(std::bit_cast<_Float16>(raw.x)) {}
  _Float16 value;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
using std::isfinite;

inline float __half2float(__half half) { return static_cast<float>(half.value); }
inline __half __float2half_rn(float value) { return __half(static_cast<_Float16>(value)); }
inline __half __ushort_as_half(uint16_t bits) { return __half(std::bit_cast<_Float16>(bits)); }
inline uint16_t __half_as_ushort(__half half) { return std::bit_cast<uint16_t>(half.value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(uint32_t{value.bits} << 16);
}
// By comparing with both neighbours in double precision.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (std::isnan(value)) return {0x7fff};
  const auto below = static_cast<uint16_t>(__float_as_uint(value) >> 16);
  if (std::isinf(value)) return {below};
  const auto above = static_cast<uint16_t>(below + 1);
  const double least = __bfloat162float({below});
  // The neighbour of the largest number is where the next power of two would be.
  const double most = std::isinf(__bfloat162float({above})) ? std::copysign(0x1p128, value)
                                                            : __bfloat162float({above});
  const double to_least = std::abs(value - least), to_most = std::abs(most - value);
  if (to_least != to_most) return {to_least < to_most ? below : above};
  return {below % 2 == 0 ? below : above};
}

using __nv_fp8_storage_t = uint8_t;
inline constexpr int __NV_SATFINITE = 1, __NV_E4M3 = 0;

inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t code, int) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  double value = exponent == 0 ? mantissa * 0x1p-9 : (8 + mantissa) * std::exp2(exponent - 10);
  if ((code & 0x7f) == 0x7f) value = std::numeric_limits<double>::quiet_NaN();
  return {std::bit_cast<uint16_t>(static_cast<_Float16>(code >= 128 ? -value : value))};
}

// The nearest of all 254 numbers; of two the even code.
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, int, int) {
  if (std::isnan(value)) return 0x7f;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  uint8_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (uint8_t code = 0; code < 0x7f; ++code) {
    const double number = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, 0)));
    const double apart = std::abs(number - std::abs(double{value}));
    if (apart < least || (apart == least && code % 2 == 0)) {
      least = apart;
      best = code;
    }
  }
  return sign | best;
}

namespace cuda_on_cpu {

inline constexpr unsigned kWarp = 32;

struct Warp {
  std::barrier<> meet{kWarp};
  float given[kWarp];
};
inline thread_local Warp* warp = nullptr;

// Every lane of every warp of every group, one warp at a time.
template <typename Kernel, typename... Arguments>
void run(Kernel kernel, unsigned groups, unsigned threads, cudaStream_t, Arguments... arguments) {
  Warp shared;
  std::vector<std::jthread> lanes;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    lanes.emplace_back([&, lane] {
      warp = &shared;
      gridDim.x = groups;
      for (blockIdx.x = 0; blockIdx.x < groups; ++blockIdx.x) {
        for (unsigned first = 0; first < threads; first += kWarp) {
          threadIdx.x = first + lane;
          kernel(arguments...);
        }
      }
    });
  }
}

}  // namespace cuda_on_cpu

inline float __shfl_xor_sync(unsigned, float value, int apart) {
  cuda_on_cpu::Warp& warp = *cuda_on_cpu::warp;
  const unsigned lane = threadIdx.x % cuda_on_cpu::kWarp;
  warp.given[lane] = value;
  warp.meet.arrive_and_wait();
  const float taken = warp.given[lane ^ static_cast<unsigned>(apart)];
  warp.meet.arrive_and_wait();
  return taken;
}

#define CXL_OFFLOAD_LAUNCH(kernel, groups, threads, stream, ...) \
  cuda_on_cpu::run(kernel, groups, threads, stream, __VA_ARGS__)

#endif  // CXL_OFFLOAD_TESTS_CUDA_ON_CPU_H_
