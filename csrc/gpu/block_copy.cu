// Copies many scattered blocks in one launch, between device memory and host memory that is mapped
// for the device (pinned memory is). One launch serves all blocks, because a call for each costs
// microseconds, which is more than copying a small block takes.
//
// The entry points are plain C with streams as integers, and know no torch. gpu/cuda_kernels loads
// them at run time.
#include <cstddef>
#include <cstdint>

#include "gpu/launch.h"

namespace {

constexpr unsigned kThreads = 256;

// How many loads a thread issues before its first store. A load from host memory takes a
// microsecond, and only more loads at the same time hide that.
constexpr unsigned kInFlight = 4;

// Wide enough that every load is one full transaction over the link.
using Wide = uint4;

// What one group copies at a time, so that several groups share a large block. It is a multiple of
// what the group has under way.
constexpr size_t kSliceBytes = size_t{2} * kThreads * kInFlight * sizeof(Wide);

// Enough groups to keep any link busy, and few enough to leave room for other kernels. The groups
// take the remaining slices in turn.
constexpr unsigned kMaxGroups = 256;

template <typename Unit>
__device__ void copy_units(const Unit* __restrict__ source, Unit* __restrict__ target,
                           size_t units) {
  size_t i = threadIdx.x;
  for (; i + (kInFlight - 1) * kThreads < units; i += kInFlight * kThreads) {
    Unit held[kInFlight];
    CXL_OFFLOAD_UNROLL
    for (unsigned k = 0; k < kInFlight; ++k) held[k] = source[i + k * kThreads];
    CXL_OFFLOAD_UNROLL
    for (unsigned k = 0; k < kInFlight; ++k) target[i + k * kThreads] = held[k];
  }
  for (; i < units; i += kThreads) target[i] = source[i];
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(const uint64_t* __restrict__ sources, const uint64_t* __restrict__ targets,
                       size_t count, size_t block_bytes, size_t slices_per_block) {
  const size_t slices = count * slices_per_block;
  for (size_t slice = blockIdx.x; slice < slices; slice += gridDim.x) {
    const size_t block = slice / slices_per_block;
    const size_t offset = slice % slices_per_block * kSliceBytes;
    const size_t left = block_bytes - offset;
    const size_t bytes = left < kSliceBytes ? left : kSliceBytes;
    copy_units(reinterpret_cast<const Unit*>(sources[block] + offset),
               reinterpret_cast<Unit*>(targets[block] + offset), bytes / sizeof(Unit));
  }
}

}  // namespace

extern "C" {

// Says what this library was compiled with, for reports.
__attribute__((visibility("default"))) int cxl_offload_cuda_runtime_version() {
  return CUDART_VERSION;
}

// Queues `count` copies of `block_bytes` each on `stream`. `sources` and `targets` are arrays of
// addresses that the device can read and that stay valid until the stream has run the copies.
// `aligned` promises that every address and the size are multiples of 16. Returns a cudaError_t.
__attribute__((visibility("default"))) int cxl_offload_copy_blocks_to(
    const uint64_t* targets, const uint64_t* sources, size_t count, size_t block_bytes,
    bool aligned, uint64_t stream) {
  if (count == 0 || block_bytes == 0) return cudaSuccess;
  const size_t slices_per_block = (block_bytes + kSliceBytes - 1) / kSliceBytes;
  const size_t slices = count * slices_per_block;
  const auto groups = static_cast<unsigned>(slices < kMaxGroups ? slices : kMaxGroups);
  auto* const queue = reinterpret_cast<cudaStream_t>(stream);
  const auto kernel = aligned ? copy_blocks_kernel<Wide> : copy_blocks_kernel<uint8_t>;
  CXL_OFFLOAD_LAUNCH(kernel, groups, kThreads, queue, sources, targets, count, block_bytes,
                     slices_per_block);
  return cudaGetLastError();
}

// Returns the text of an error that the functions above return.
__attribute__((visibility("default"))) const char* cxl_offload_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

}  // extern "C"
