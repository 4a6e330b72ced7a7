// How a kernel is started and how its loops are unrolled. Compiled by nvcc it is a CUDA launch; the
// tests compile the same kernels with g++ and run them on the CPU, warp by warp, where there is no
// GPU (tests/cpp/cuda_on_cpu.h).
#ifndef CXL_OFFLOAD_GPU_LAUNCH_H_
#define CXL_OFFLOAD_GPU_LAUNCH_H_

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#define CXL_OFFLOAD_UNROLL _Pragma("unroll")
#define CXL_OFFLOAD_LAUNCH(kernel, groups, threads, stream, ...) \
  kernel<<<groups, threads, 0, stream>>>(__VA_ARGS__)

#else

#include "cuda_on_cpu.h"

#endif

#endif  // CXL_OFFLOAD_GPU_LAUNCH_H_
