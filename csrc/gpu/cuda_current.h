// Which context CUDA calls go to.
#ifndef CXL_OFFLOAD_GPU_CUDA_CURRENT_H_
#define CXL_OFFLOAD_GPU_CUDA_CURRENT_H_

#include <cstdint>
#include <string>

#include "gpu/cuda_api.h"
#include "gpu/driver.h"

namespace cxl_offload::gpu {

inline constexpr StreamId kLegacyDefaultStream = 1;
inline constexpr StreamId kPerThreadDefaultStream = 2;

inline CuStream stream_of(StreamId stream) {
  return reinterpret_cast<CuStream>(static_cast<uintptr_t>(stream));
}

// Makes a context current while it lives.
class Current {
 public:
  Current(const CudaApi& api, CuContext context) : api_(api), result_(api.context_push(context)) {}
  ~Current() {
    CuContext popped = nullptr;
    if (result_ == kCuSuccess) api_.context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  CuResult result() const { return result_; }

 private:
  const CudaApi& api_;
  const CuResult result_;
};

// Makes the context of a stream current while it lives; throws, saying what was tried.
class InStream {
 public:
  InStream(const CudaApi& api, StreamId stream, const std::string& tried)
      : current_(api, context_of(api, stream, tried)) {
    api.check(current_.result(), tried + ": cuCtxPushCurrent");
  }

 private:
  static CuContext context_of(const CudaApi& api, StreamId stream, const std::string& tried);

  const Current current_;
};

}  // namespace cxl_offload::gpu

#endif  // CXL_OFFLOAD_GPU_CUDA_CURRENT_H_
