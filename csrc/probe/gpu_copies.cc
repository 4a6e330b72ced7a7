#include "probe/gpu_copies.h"

#include <array>
#include <cctype>

#include "core/error.h"
#include "gpu/cuda_current.h"

namespace cxl_offload::probe {
namespace {

using gpu::Current;

// Returns null, with a reason, if there is no driver that can be used.
std::shared_ptr<const gpu::CudaApi> load_started(const std::string& library, std::string& reason) {
  auto api = gpu::CudaApi::load(library, reason);
  if (api == nullptr) return nullptr;
  if (const gpu::CuResult result = api->init(0); result != gpu::kCuSuccess) {
    reason = "cuInit: " + api->describe(result);
    return nullptr;
  }
  return api;
}

std::shared_ptr<const gpu::CudaApi> loaded(const std::string& library) {
  std::string reason;
  auto api = load_started(library, reason);
  if (api == nullptr) throw InvalidArgument("measure copies to a GPU: no CUDA driver: " + reason);
  return api;
}

std::string lower(std::string text) {
  for (char& letter : text) {
    letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return text;
}

}  // namespace

GpuList list_gpus(const std::string& library) {
  GpuList found;
  const auto api = load_started(library, found.reason);
  if (api == nullptr) return found;
  int count = 0;
  api->check(api->device_get_count(&count), "count GPUs: cuDeviceGetCount");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    gpu::CuDevice device = 0;
    std::array<char, 256> name{};
    std::array<char, 32> address{};
    api->check(api->device_get(&device, ordinal), "list GPUs: cuDeviceGet");
    api->check(api->device_name(name.data(), name.size() - 1, device),
               "list GPUs: cuDeviceGetName");
    api->check(api->device_pci_address(address.data(), address.size() - 1, device),
               "list GPUs: cuDeviceGetPCIBusId");
    found.gpus.push_back({name.data(), lower(address.data())});
  }
  if (found.gpus.empty()) found.reason = "the driver finds no GPU";
  return found;
}

GpuCopies::GpuCopies(const std::string& library, int ordinal, std::span<std::byte> host)
    : api_(loaded(library)), host_(host) {
  int count = 0;
  api_->check(api_->device_get_count(&count), "measure copies: cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw InvalidArgument("measure copies to GPU " + std::to_string(ordinal) + ": there are " +
                          std::to_string(count));
  }
  try {
    acquire(ordinal);
  } catch (...) {
    release();
    throw;
  }
}

GpuCopies::~GpuCopies() { release(); }

void GpuCopies::acquire(int ordinal) {
  const std::string tried = "measure copies of " + format_bytes(host_.size()) + " to GPU " +
                            std::to_string(ordinal) + ": ";
  api_->check(api_->device_get(&device_, ordinal), tried + "cuDeviceGet");
  api_->check(api_->primary_retain(&context_, device_), tried + "cuDevicePrimaryCtxRetain");
  const Current current(*api_, context_);
  api_->check(current.result(), tried + "cuCtxPushCurrent");
  api_->check(api_->stream_create(&stream_, gpu::kCuStreamNonBlocking), tried + "cuStreamCreate");
  api_->check(api_->memory_allocate(&memory_, host_.size()), tried + "cuMemAlloc");
  api_->check(api_->host_register(host_.data(), host_.size(), gpu::kCuHostRegisterPortable),
              tried + "cuMemHostRegister");
  registered_ = true;
}

void GpuCopies::release() noexcept {
  if (context_ == nullptr) return;
  {
    const Current current(*api_, context_);
    if (current.result() == gpu::kCuSuccess) {
      if (stream_ != nullptr) api_->stream_destroy(stream_);
      if (memory_ != 0) api_->memory_free(memory_);
      if (registered_) api_->host_unregister(host_.data());
    }
  }
  api_->primary_release(device_);
  context_ = nullptr;
}

void GpuCopies::copy(bool to_device, size_t bytes) {
  if (bytes == 0 || bytes > host_.size()) {
    throw InvalidArgument("copy " + format_bytes(bytes) + ": the buffers hold " +
                          format_bytes(host_.size()));
  }
  const uint64_t host = reinterpret_cast<uintptr_t>(host_.data());
  const Current current(*api_, context_);
  api_->check(current.result(), "copy: cuCtxPushCurrent");
  api_->check(
      api_->memcpy_async(to_device ? memory_ : host, to_device ? host : memory_, bytes, stream_),
      "copy: cuMemcpyAsync");
  api_->check(api_->context_synchronize(), "copy: cuCtxSynchronize");
}

}  // namespace cxl_offload::probe
