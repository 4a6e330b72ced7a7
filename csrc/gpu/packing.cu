// Packs numbers into 4-bit or 8-bit codes on their way out of the GPU and unpacks them on their way
// in, many scattered blocks in one launch. The format is that of transfer/packing.h, bit for bit;
// packed blocks may lie in device memory or in host memory that is mapped for the device.
//
// The entry points are plain C with streams as integers, and know no torch. gpu/cuda_kernels loads
// them at run time.
#include <cstddef>
#include <cstdint>

#include "gpu/launch.h"

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kLanes = 32;
constexpr unsigned kEveryLane = 0xffffffffU;
constexpr unsigned kMaxGroups = 1024;

constexpr int kInt4 = 0, kFp8 = 1;
constexpr int kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2;

constexpr float kMostInt4 = 15.0F;
constexpr float kLargestFp8 = 448.0F;

// How many numbers one thread packs. They make 16 bytes of codes.
template <int code>
constexpr unsigned kUnit = code == kInt4 ? 32 : 16;

__device__ float to_float(__half value) { return __half2float(value); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float to_float(float value) { return value; }

template <typename T>
__device__ T from_float(float value);
template <>
__device__ __half from_float(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ float from_float(float value) {
  return value;
}

// Loads the `held` numbers of a unit, 16 bytes at a time where the address allows.
template <typename T, unsigned unit>
__device__ void load_unit(const T* source, unsigned held, float (&values)[unit]) {
  constexpr unsigned kEach = sizeof(uint4) / sizeof(T);
  if (held == unit && reinterpret_cast<uintptr_t>(source) % sizeof(uint4) == 0) {
    CXL_OFFLOAD_UNROLL
    for (unsigned i = 0; i < unit; i += kEach) {
      const uint4 wide = *reinterpret_cast<const uint4*>(source + i);
      T narrow[kEach];
      __builtin_memcpy(narrow, &wide, sizeof(wide));
      CXL_OFFLOAD_UNROLL
      for (unsigned k = 0; k < kEach; ++k) values[i + k] = to_float(narrow[k]);
    }
  } else {
    CXL_OFFLOAD_UNROLL
    for (unsigned i = 0; i < unit; ++i) values[i] = i < held ? to_float(source[i]) : 0.0F;
  }
}

template <typename T, unsigned unit>
__device__ void store_unit(T* target, unsigned held, const float (&values)[unit]) {
  constexpr unsigned kEach = sizeof(uint4) / sizeof(T);
  if (held == unit && reinterpret_cast<uintptr_t>(target) % sizeof(uint4) == 0) {
    CXL_OFFLOAD_UNROLL
    for (unsigned i = 0; i < unit; i += kEach) {
      T narrow[kEach];
      CXL_OFFLOAD_UNROLL
      for (unsigned k = 0; k < kEach; ++k) narrow[k] = from_float<T>(values[i + k]);
      uint4 wide;
      __builtin_memcpy(&wide, narrow, sizeof(wide));
      *reinterpret_cast<uint4*>(target + i) = wide;
    }
  } else {
    CXL_OFFLOAD_UNROLL
    for (unsigned i = 0; i < unit; ++i) {
      if (i < held) target[i] = from_float<T>(values[i]);
    }
  }
}

__device__ float least_of(float value, unsigned lanes) {
  for (unsigned apart = 1; apart < lanes; apart *= 2) {
    value = fminf(value, __shfl_xor_sync(kEveryLane, value, static_cast<int>(apart)));
  }
  return value;
}

__device__ float most_of(float value, unsigned lanes) {
  for (unsigned apart = 1; apart < lanes; apart *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kEveryLane, value, static_cast<int>(apart)));
  }
  return value;
}

// Returns the bits of the scales. `codes` receives what this thread stores.
__device__ uint32_t pack_unit(const float (&values)[kUnit<kInt4>], unsigned held, unsigned lanes,
                              uint32_t (&codes)[4]) {
  float least = INFINITY, most = -INFINITY, odd = 0;
  CXL_OFFLOAD_UNROLL
  for (unsigned i = 0; i < kUnit<kInt4>; ++i) {
    if (i >= held) continue;
    least = fminf(least, values[i]);
    most = fmaxf(most, values[i]);
    if (!isfinite(values[i])) odd = 1;
  }
  least = least_of(least, lanes);
  most = most_of(most, lanes);
  __half low = __float2half_rn(least);
  __half step = __float2half_rn(__fdiv_rn(__fsub_rn(most, __half2float(low)), kMostInt4));
  const bool fits =
      most_of(odd, lanes) == 0 && isfinite(__half2float(low)) && isfinite(__half2float(step));
  if (!fits) {
    low = __ushort_as_half(0x7e00);
    step = __ushort_as_half(0);
  }
  const float from = __half2float(low), by = __half2float(step);
  const bool coded = fits && by != 0;
  CXL_OFFLOAD_UNROLL
  for (unsigned word = 0; word < 4; ++word) {
    codes[word] = 0;
    CXL_OFFLOAD_UNROLL
    for (unsigned k = 0; k < 8; ++k) {
      const unsigned i = word * 8 + k;
      if (!coded || i >= held) continue;
      const float steps = rintf(__fdiv_rn(__fsub_rn(values[i], from), by));
      const auto code = static_cast<uint32_t>(fminf(fmaxf(steps, 0.0F), kMostInt4));
      codes[word] |= code << (k / 2 * 8 + (k % 2 == 0 ? 4 : 0));
    }
  }
  return uint32_t{__half_as_ushort(low)} | uint32_t{__half_as_ushort(step)} << 16;
}

__device__ uint32_t pack_unit(const float (&values)[kUnit<kFp8>], unsigned held, unsigned lanes,
                              uint32_t (&codes)[4]) {
  float most = 0;
  CXL_OFFLOAD_UNROLL
  for (unsigned i = 0; i < kUnit<kFp8>; ++i) {
    if (i < held && isfinite(values[i])) most = fmaxf(most, fabsf(values[i]));
  }
  float unit = __fdiv_rn(most_of(most, lanes), kLargestFp8);
  if (unit == 0) unit = 1;
  CXL_OFFLOAD_UNROLL
  for (unsigned word = 0; word < 4; ++word) {
    codes[word] = 0;
    CXL_OFFLOAD_UNROLL
    for (unsigned k = 0; k < 4; ++k) {
      const unsigned i = word * 4 + k;
      if (i >= held) continue;
      const float scaled = __fdiv_rn(values[i], unit);
      const uint32_t code =
          isfinite(scaled) ? __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3) : 0x7f;
      codes[word] |= code << (k * 8);
    }
  }
  return __float_as_uint(unit);
}

__device__ void unpack_unit(const uint32_t (&codes)[4], uint32_t scale,
                            float (&values)[kUnit<kInt4>]) {
  const float low = __half2float(__ushort_as_half(static_cast<uint16_t>(scale)));
  const float step = __half2float(__ushort_as_half(static_cast<uint16_t>(scale >> 16)));
  CXL_OFFLOAD_UNROLL
  for (unsigned i = 0; i < kUnit<kInt4>; ++i) {
    const unsigned shift = i % 8 / 2 * 8 + (i % 2 == 0 ? 4 : 0);
    values[i] = __fmaf_rn(static_cast<float>(codes[i / 8] >> shift & 15), step, low);
  }
}

__device__ void unpack_unit(const uint32_t (&codes)[4], uint32_t scale,
                            float (&values)[kUnit<kFp8>]) {
  const float unit = __uint_as_float(scale);
  CXL_OFFLOAD_UNROLL
  for (unsigned i = 0; i < kUnit<kFp8>; ++i) {
    const auto code = static_cast<__nv_fp8_storage_t>(codes[i / 4] >> (i % 4 * 8));
    const __half half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3));
    values[i] = __fmul_rn(__half2float(half), unit);
  }
}

// Where a thread works. Whole warps work together, because their threads exchange values.
struct Place {
  size_t block;
  size_t unit;  // in the block
  bool exists;
  unsigned held;  // numbers there
};

template <int code>
__device__ Place place_of(size_t tile, size_t tiles_each, size_t units, size_t count) {
  Place place;
  place.block = tile / tiles_each;
  place.unit = tile % tiles_each * kLanes + threadIdx.x % kLanes;
  place.exists = place.unit < units;
  const size_t first = place.unit * kUnit<code>;
  const size_t left = first < count ? count - first : 0;
  place.held = static_cast<unsigned>(left < kUnit<code> ? left : kUnit<code>);
  return place;
}

template <int code, typename T>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const uint64_t* __restrict__ sources, const uint64_t* __restrict__ targets,
                size_t blocks, size_t count, unsigned lanes, size_t units) {
  const size_t tiles_each = (units + kLanes - 1) / kLanes;
  const size_t step = size_t{gridDim.x} * (kThreads / kLanes);
  const size_t first = size_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  for (size_t tile = first; tile < blocks * tiles_each; tile += step) {
    const Place place = place_of<code>(tile, tiles_each, units, count);
    float values[kUnit<code>];
    load_unit(reinterpret_cast<const T*>(sources[place.block]) + place.unit * kUnit<code>,
              place.held, values);
    uint32_t codes[4];
    const uint32_t scale = pack_unit(values, place.held, lanes, codes);
    if (!place.exists) continue;
    auto* const target = reinterpret_cast<uint4*>(targets[place.block]);
    target[place.unit] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    if (place.unit % lanes == 0) {
      reinterpret_cast<uint32_t*>(target + units)[place.unit / lanes] = scale;
    }
  }
}

template <int code, typename T>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const uint64_t* __restrict__ sources, const uint64_t* __restrict__ targets,
                  size_t blocks, size_t count, unsigned lanes, size_t units) {
  const size_t tiles_each = (units + kLanes - 1) / kLanes;
  const size_t step = size_t{gridDim.x} * (kThreads / kLanes);
  const size_t first = size_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  for (size_t tile = first; tile < blocks * tiles_each; tile += step) {
    const Place place = place_of<code>(tile, tiles_each, units, count);
    if (!place.exists) continue;
    const auto* const source = reinterpret_cast<const uint4*>(sources[place.block]);
    const uint4 wide = source[place.unit];
    const uint32_t scale = reinterpret_cast<const uint32_t*>(source + units)[place.unit / lanes];
    const uint32_t codes[4] = {wide.x, wide.y, wide.z, wide.w};
    float values[kUnit<code>];
    unpack_unit(codes, scale, values);
    store_unit(reinterpret_cast<T*>(targets[place.block]) + place.unit * kUnit<code>, place.held,
               values);
  }
}

struct Work {
  const uint64_t* sources;
  const uint64_t* targets;
  size_t blocks;
  size_t count;
  size_t group;
  cudaStream_t stream;
  bool unpack;
};

template <int code, typename T>
int launch(const Work& work) {
  if (work.blocks == 0 || work.count == 0) return cudaSuccess;
  const auto lanes = static_cast<unsigned>(work.group / kUnit<code>);
  const size_t groups = (work.count + work.group - 1) / work.group;
  const size_t units = groups * lanes;
  const size_t tiles = work.blocks * ((units + kLanes - 1) / kLanes);
  const size_t wanted = (tiles + kThreads / kLanes - 1) / (kThreads / kLanes);
  const auto grid = static_cast<unsigned>(wanted < kMaxGroups ? wanted : kMaxGroups);
  const auto kernel = work.unpack ? unpack_kernel<code, T> : pack_kernel<code, T>;
  CXL_OFFLOAD_LAUNCH(kernel, grid, kThreads, work.stream, work.sources, work.targets, work.blocks,
                     work.count, lanes, units);
  return cudaGetLastError();
}

template <int code>
int launch_for(int element, const Work& work) {
  switch (element) {
    case kFloat16:
      return launch<code, __half>(work);
    case kBfloat16:
      return launch<code, __nv_bfloat16>(work);
    case kFloat32:
      return launch<code, float>(work);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

extern "C" {

// Packs (or unpacks) `blocks` blocks of `count` numbers each on `stream`. `code` and `element` are
// those of transfer/packing.h, `group` is 32, 64, 128 or 256. `sources` and `targets` are arrays
// of addresses that the device can read and that stay valid until the stream has run. Addresses of
// packed blocks are multiples of 16. Returns a cudaError_t.
__attribute__((visibility("default"))) int cxl_offload_pack_blocks_to(
    int code, int element, size_t group, bool unpack, const uint64_t* targets,
    const uint64_t* sources, size_t blocks, size_t count, uint64_t stream) {
  if (group < 32 || group > 256 || (group & (group - 1)) != 0) return cudaErrorInvalidValue;
  const Work work{sources, targets, blocks, count, group, reinterpret_cast<cudaStream_t>(stream),
                  unpack};
  if (code == kInt4) return launch_for<kInt4>(element, work);
  if (code == kFp8) return launch_for<kFp8>(element, work);
  return cudaErrorInvalidValue;
}

}  // extern "C"
