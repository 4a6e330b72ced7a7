// Copies between one GPU and one range of host memory, to be timed.
#ifndef CXL_OFFLOAD_PROBE_GPU_COPIES_H_
#define CXL_OFFLOAD_PROBE_GPU_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu/cuda_api.h"

namespace cxl_offload::probe {

struct GpuName {
  std::string name;
  std::string pci_address;  // lower case, "0000:3b:00.0"
};

struct GpuList {
  std::vector<GpuName> gpus;  // in the driver's order
  std::string reason;         // why there is none
};

// Lists the GPUs of the CUDA driver. It makes no context.
GpuList list_gpus(const std::string& library);

// Pins a range of host memory for one GPU and holds as much memory there. Unlike the driver of the
// pools, it always takes the GPU's primary context, and makes it when none is in use: a measurement
// is a program of its own. Not thread-safe.
class GpuCopies {
 public:
  // `host` is made of whole pages and outlives this. Throws InvalidArgument for a GPU that is not
  // there, OutOfMemory or SystemError for what the driver refuses; then nothing is left behind.
  GpuCopies(const std::string& library, int ordinal, std::span<std::byte> host);
  ~GpuCopies();
  GpuCopies(const GpuCopies&) = delete;
  GpuCopies& operator=(const GpuCopies&) = delete;

  // Returns when the first `bytes` bytes are on the other side.
  void copy(bool to_device, size_t bytes);

 private:
  void acquire(int ordinal);
  void release() noexcept;

  const std::shared_ptr<const gpu::CudaApi> api_;
  const std::span<std::byte> host_;
  gpu::CuDevice device_ = 0;
  gpu::CuContext context_ = nullptr;
  gpu::CuStream stream_ = nullptr;
  uint64_t memory_ = 0;
  bool registered_ = false;
};

}  // namespace cxl_offload::probe

#endif  // CXL_OFFLOAD_PROBE_GPU_COPIES_H_
