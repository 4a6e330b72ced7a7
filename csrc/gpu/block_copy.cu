// Copies many scattered blocks in one launch, between device memory and host memory that is mapped
// for the device (pinned memory is). One launch for all blocks: a copy call each costs
// microseconds, more than a small block itself.
//
// Plain C entry points, streams as integers, no torch: loaded at run time by gpu/cuda_kernels.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace {

constexpr int kThreads = 256;

// Enough groups of threads to fill any device; blocks beyond are taken in turn.
constexpr unsigned kMaxGroups = 4096;

// Wide enough that every load is one full transaction over the link.
using Wide = uint4;

template <typename Unit>
__device__ void copy_units(const void* from, void* to, size_t units) {
  const auto* source = static_cast<const Unit*>(from);
  auto* target = static_cast<Unit*>(to);
  for (size_t i = threadIdx.x; i < units; i += kThreads) target[i] = source[i];
}

__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(const uint64_t* sources, const uint64_t* targets, size_t count,
                       size_t block_bytes, bool wide) {
  for (size_t block = blockIdx.x; block < count; block += gridDim.x) {
    const auto* from = reinterpret_cast<const void*>(sources[block]);
    auto* to = reinterpret_cast<void*>(targets[block]);
    if (wide) {
      copy_units<Wide>(from, to, block_bytes / sizeof(Wide));
    } else {
      copy_units<uint8_t>(from, to, block_bytes);
    }
  }
}

}  // namespace

extern "C" {

// What this library was compiled with, for reports.
__attribute__((visibility("default"))) int cxl_offload_cuda_runtime_version() {
  return CUDART_VERSION;
}

// Queues `count` copies of `block_bytes` each on `stream`. `sources` and `targets` are arrays of
// addresses that the device can read and that stay valid until the stream has run the copies.
// `aligned` promises that every address and the size are multiples of 16. Returns a cudaError_t.
__attribute__((visibility("default"))) int cxl_offload_copy_blocks(const uint64_t* sources,
                                                                   const uint64_t* targets,
                                                                   size_t count, size_t block_bytes,
                                                                   bool aligned, uint64_t stream) {
  if (count == 0 || block_bytes == 0) return cudaSuccess;
  const auto groups = static_cast<unsigned>(count < kMaxGroups ? count : kMaxGroups);
  copy_blocks_kernel<<<groups, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      sources, targets, count, block_bytes, aligned);
  return cudaGetLastError();
}

// The text of what the functions above return.
__attribute__((visibility("default"))) const char* cxl_offload_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

}  // extern "C"
