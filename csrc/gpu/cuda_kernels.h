// The optional library of CUDA kernels (gpu/*.cu), loaded at run time: it is there when nvcc was
// at hand at build time, and nothing else in the package depends on it.
#ifndef CXL_OFFLOAD_GPU_CUDA_KERNELS_H_
#define CXL_OFFLOAD_GPU_CUDA_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "gpu/driver.h"
#include "transfer/packing.h"

namespace cxl_offload::gpu {

class CudaKernels {
 public:
  // Throws InvalidArgument, with the loader's reason, when the library cannot be used.
  explicit CudaKernels(const std::string& path);
  ~CudaKernels();
  CudaKernels(const CudaKernels&) = delete;
  CudaKernels& operator=(const CudaKernels&) = delete;

  // Returns the CUDA runtime that it was compiled with: 13000 is 13.0.
  int runtime_version() const;
  // Queues `count` copies of `block_bytes` each on `stream`, in one launch. `targets` and `sources`
  // point to arrays of addresses that the device can read and that outlive the copies. Throws
  // SystemError with the CUDA error's text.
  void copy_blocks(const uint64_t* targets, const uint64_t* sources, size_t count,
                   size_t block_bytes, bool aligned, StreamId stream) const;
  // Packs `blocks` blocks of `count` numbers each, or unpacks them. Addresses of packed blocks are
  // multiples of 16.
  void pack_blocks(const transfer::Packing& packing, bool unpack, const uint64_t* targets,
                   const uint64_t* sources, size_t blocks, size_t count, StreamId stream) const;

 private:
  void* find(const char* name) const;

  void* library_;
  int (*runtime_version_)();
  int (*copy_blocks_)(const uint64_t*, const uint64_t*, size_t, size_t, bool, uint64_t);
  int (*pack_blocks_)(int, int, size_t, bool, const uint64_t*, const uint64_t*, size_t, size_t,
                      uint64_t);
  const char* (*error_text_)(int);
};

}  // namespace cxl_offload::gpu

#endif  // CXL_OFFLOAD_GPU_CUDA_KERNELS_H_
