#include "gpu/cuda_api.h"

#include <dlfcn.h>

#include <cerrno>

#include "core/error.h"

namespace cxl_offload::gpu {
namespace {

class Symbols {
 public:
  Symbols(void* library, std::string& reason) : library_(library), reason_(reason) {}

  template <class Function>
  void bind(Function*& function, const char* name) {
    bind_if_there(function, name);
    if (function == nullptr && reason_.empty()) {
      reason_ = std::string("the driver is too old: it has no ") + name;
    }
  }

  template <class Function>
  void bind_if_there(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(library_, name));
  }

 private:
  void* library_;
  std::string& reason_;
};

int errno_of(CuResult result) {
  switch (result) {
    case kCuInvalidValue:
      return EINVAL;
    case kCuAlreadyRegistered:
      return EEXIST;
    case kCuNotPermitted:
      return EPERM;
    case kCuNotSupported:
      return ENOTSUP;
    default:
      return EIO;
  }
}

}  // namespace

// Long: a line for each symbol of the driver.
std::shared_ptr<const CudaApi> CudaApi::load(const std::string& library, std::string& reason) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    reason = error == nullptr ? library + " cannot be loaded" : error;
    return nullptr;
  }
  reason.clear();
  auto api = std::make_shared<CudaApi>();
  Symbols symbols(handle, reason);
  symbols.bind(api->init, "cuInit");
  symbols.bind(api->device_get_count, "cuDeviceGetCount");
  symbols.bind(api->device_get, "cuDeviceGet");
  symbols.bind(api->device_name, "cuDeviceGetName");
  symbols.bind(api->device_pci_address, "cuDeviceGetPCIBusId");
  symbols.bind(api->primary_state, "cuDevicePrimaryCtxGetState");
  symbols.bind(api->primary_retain, "cuDevicePrimaryCtxRetain");
  symbols.bind(api->primary_release, "cuDevicePrimaryCtxRelease_v2");
  symbols.bind(api->context_current, "cuCtxGetCurrent");
  symbols.bind(api->context_push, "cuCtxPushCurrent_v2");
  symbols.bind(api->context_pop, "cuCtxPopCurrent_v2");
  symbols.bind(api->context_synchronize, "cuCtxSynchronize");
  symbols.bind(api->memory_allocate, "cuMemAlloc_v2");
  symbols.bind(api->memory_free, "cuMemFree_v2");
  symbols.bind(api->host_register, "cuMemHostRegister_v2");
  symbols.bind(api->host_unregister, "cuMemHostUnregister");
  symbols.bind(api->stream_context, "cuStreamGetCtx");
  symbols.bind(api->stream_is_capturing, "cuStreamIsCapturing");
  symbols.bind(api->event_create, "cuEventCreate");
  symbols.bind(api->event_record, "cuEventRecord");
  symbols.bind(api->event_query, "cuEventQuery");
  symbols.bind(api->event_synchronize, "cuEventSynchronize");
  symbols.bind(api->event_destroy, "cuEventDestroy_v2");
  symbols.bind(api->stream_create, "cuStreamCreate");
  symbols.bind(api->stream_destroy, "cuStreamDestroy_v2");
  symbols.bind(api->stream_wait_event, "cuStreamWaitEvent");
  symbols.bind(api->memcpy_async, "cuMemcpyAsync");
  symbols.bind_if_there(api->memcpy_batch_async, "cuMemcpyBatchAsync_v2");
  symbols.bind(api->error_name, "cuGetErrorName");
  symbols.bind(api->error_string, "cuGetErrorString");
  if (!reason.empty()) return nullptr;
  return api;
}

std::string CudaApi::describe(CuResult result) const {
  const char* text = nullptr;
  const char* name = nullptr;
  if (error_string(result, &text) != kCuSuccess || text == nullptr) text = "unknown error";
  if (error_name(result, &name) != kCuSuccess || name == nullptr) name = "CUresult";
  return std::string(text) + " (" + name + ", " + std::to_string(result) + ")";
}

void CudaApi::check(CuResult result, const std::string& tried) const {
  if (result == kCuSuccess) return;
  const std::string message = tried + ": " + describe(result);
  if (result == kCuOutOfMemory) throw OutOfMemory(message);
  throw SystemError(errno_of(result), message);
}

}  // namespace cxl_offload::gpu
