#include "gpu/cuda_kernels.h"

#include <dlfcn.h>

#include <cerrno>

#include "core/error.h"

namespace cxl_offload::gpu {

CudaKernels::CudaKernels(const std::string& path)
    : library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ == nullptr) {
    throw InvalidArgument(std::string("load the CUDA kernels: ") + dlerror() +
                          "; they are built when nvcc is at hand at install time");
  }
  try {
    runtime_version_ =
        reinterpret_cast<decltype(runtime_version_)>(find("cxl_offload_cuda_runtime_version"));
    copy_blocks_ = reinterpret_cast<decltype(copy_blocks_)>(find("cxl_offload_copy_blocks_to"));
    pack_blocks_ = reinterpret_cast<decltype(pack_blocks_)>(find("cxl_offload_pack_blocks_to"));
    error_text_ = reinterpret_cast<decltype(error_text_)>(find("cxl_offload_cuda_error"));
  } catch (...) {
    dlclose(library_);
    throw;
  }
}

CudaKernels::~CudaKernels() { dlclose(library_); }

void* CudaKernels::find(const char* name) const {
  void* symbol = dlsym(library_, name);
  if (symbol == nullptr) {
    throw InvalidArgument(std::string("load the CUDA kernels: ") + name +
                          " is missing; the library is of another release, install again");
  }
  return symbol;
}

int CudaKernels::runtime_version() const { return runtime_version_(); }

void CudaKernels::copy_blocks(const uint64_t* targets, const uint64_t* sources, size_t count,
                              size_t block_bytes, bool aligned, StreamId stream) const {
  const int code = copy_blocks_(targets, sources, count, block_bytes, aligned, stream);
  if (code == 0) return;
  throw SystemError(EIO, "copy " + std::to_string(count) + " blocks of " +
                             format_bytes(block_bytes) + " on the GPU: " + error_text_(code));
}

void CudaKernels::pack_blocks(const transfer::Packing& packing, bool unpack,
                              const uint64_t* targets, const uint64_t* sources, size_t blocks,
                              size_t count, StreamId stream) const {
  const int code =
      pack_blocks_(static_cast<int>(packing.code()), static_cast<int>(packing.element()),
                   packing.group_elements(), unpack, targets, sources, blocks, count, stream);
  if (code == 0) return;
  throw SystemError(EIO, (unpack ? "unpack " : "pack ") + std::to_string(blocks) + " blocks of " +
                             std::to_string(count) + " numbers on the GPU: " + error_text_(code));
}

}  // namespace cxl_offload::gpu
