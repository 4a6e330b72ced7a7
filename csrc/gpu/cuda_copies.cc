// The copies of the CUDA driver, and the context they go to.
#include <string>
#include <vector>

#include "core/error.h"
#include "gpu/cuda_api.h"
#include "gpu/cuda_current.h"
#include "gpu/cuda_driver.h"

namespace cxl_offload::gpu {

CuContext InStream::context_of(const CudaApi& api, StreamId stream, const std::string& tried) {
  if (stream <= kPerThreadDefaultStream) {
    throw InvalidArgument(tried + ": a default stream means another stream in every context or " +
                          "thread; name a stream of your own");
  }
  CuContext context = nullptr;
  api.check(api.stream_context(stream_of(stream), &context), tried + ": cuStreamGetCtx");
  return context;
}

void CudaDriver::destroy_stream(StreamId stream) noexcept {
  if (in_child()) return;
  try {
    const InStream current(*api_, stream, "destroy stream");
    api_->stream_destroy(stream_of(stream));
  } catch (...) {  // when the context is gone, the stream is too
  }
}

void CudaDriver::copy(uint64_t target, uint64_t source, size_t bytes, StreamId stream) {
  refuse_in_child();
  if (bytes == 0) return;
  const InStream current(*api_, stream, "copy");
  const CuResult result = api_->memcpy_async(target, source, bytes, stream_of(stream));
  if (result != kCuSuccess) api_->check(result, "copy " + format_bytes(bytes) + ": cuMemcpyAsync");
}

bool CudaDriver::batched() const { return api_->memcpy_batch_async != nullptr; }

void CudaDriver::copy_batch(std::span<const uint64_t> targets, std::span<const uint64_t> sources,
                            std::span<const size_t> sizes, StreamId stream) {
  refuse_in_child();
  if (targets.size() != sources.size() || targets.size() != sizes.size()) {
    throw InvalidArgument("copy " + std::to_string(sources.size()) + " sources of " +
                          std::to_string(sizes.size()) + " sizes to " +
                          std::to_string(targets.size()) + " targets");
  }
  if (sizes.empty()) return;
  const InStream current(*api_, stream, "copy batch");
  if (!batched()) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      api_->check(api_->memcpy_async(targets[i], sources[i], sizes[i], stream_of(stream)),
                  "copy batch: cuMemcpyAsync");
    }
    return;
  }
  // The driver takes them as not const.
  std::vector<uint64_t> to(targets.begin(), targets.end());
  std::vector<uint64_t> from(sources.begin(), sources.end());
  std::vector<size_t> bytes(sizes.begin(), sizes.end());
  CuMemcpyAttributes attributes{kCuSourceAccessInStreamOrder, {0, 0}, {0, 0}, 0};
  size_t first = 0;
  api_->check(api_->memcpy_batch_async(to.data(), from.data(), bytes.data(), bytes.size(),
                                       &attributes, &first, 1, stream_of(stream)),
              "copy batch of " + std::to_string(bytes.size()) + ": cuMemcpyBatchAsync");
}

}  // namespace cxl_offload::gpu
