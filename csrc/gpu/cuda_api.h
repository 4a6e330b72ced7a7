// The part of the CUDA driver's interface that is used here, bound at run time. Types and numbers
// are those of NVIDIA's "CUDA Driver API" manual; the driver keeps them stable.
#ifndef CXL_OFFLOAD_GPU_CUDA_API_H_
#define CXL_OFFLOAD_GPU_CUDA_API_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace cxl_offload::gpu {

using CuResult = int;
using CuDevice = int;
using CuContext = void*;
using CuStream = void*;
using CuEvent = void*;

inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuInvalidValue = 1;
inline constexpr CuResult kCuOutOfMemory = 2;
inline constexpr CuResult kCuDeinitialized = 4;
inline constexpr CuResult kCuInvalidContext = 201;
inline constexpr CuResult kCuContextIsDestroyed = 709;
inline constexpr CuResult kCuAlreadyRegistered = 712;
inline constexpr CuResult kCuNotPermitted = 800;
inline constexpr CuResult kCuNotSupported = 801;

inline constexpr unsigned kCuHostRegisterPortable = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr unsigned kCuStreamNonBlocking = 1;

// CUmemcpyAttributes: the order of accesses to the source, two locations that are hints for managed
// memory only, and flags.
struct CuMemcpyAttributes {
  int source_access_order;
  int source_hint[2];
  int target_hint[2];
  unsigned flags;
};
inline constexpr int kCuSourceAccessInStreamOrder = 1;

struct CudaApi {
  CuResult (*init)(unsigned flags);
  CuResult (*device_get_count)(int* count);
  CuResult (*device_get)(CuDevice* device, int ordinal);
  CuResult (*device_name)(char* text, int bytes, CuDevice device);
  CuResult (*device_pci_address)(char* text, int bytes, CuDevice device);
  CuResult (*primary_state)(CuDevice device, unsigned* flags, int* active);
  CuResult (*primary_retain)(CuContext* context, CuDevice device);
  CuResult (*primary_release)(CuDevice device);
  CuResult (*context_current)(CuContext* context);
  CuResult (*context_push)(CuContext context);
  CuResult (*context_pop)(CuContext* context);
  CuResult (*context_synchronize)();
  CuResult (*memory_allocate)(uint64_t* address, size_t bytes);
  CuResult (*memory_free)(uint64_t address);
  CuResult (*host_register)(void* address, size_t bytes, unsigned flags);
  CuResult (*host_unregister)(void* address);
  CuResult (*stream_context)(CuStream stream, CuContext* context);
  CuResult (*stream_is_capturing)(CuStream stream, int* capturing);
  CuResult (*event_create)(CuEvent* event, unsigned flags);
  CuResult (*event_record)(CuEvent event, CuStream stream);
  CuResult (*event_query)(CuEvent event);
  CuResult (*event_synchronize)(CuEvent event);
  CuResult (*event_destroy)(CuEvent event);
  CuResult (*stream_create)(CuStream* stream, unsigned flags);
  CuResult (*stream_destroy)(CuStream stream);
  CuResult (*stream_wait_event)(CuStream stream, CuEvent event, unsigned flags);
  CuResult (*memcpy_async)(uint64_t target, uint64_t source, size_t bytes, CuStream stream);
  // It is null before driver 580 (CUDA 13.0), whose form of the call is used here.
  CuResult (*memcpy_batch_async)(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                                 CuMemcpyAttributes* attributes, size_t* attribute_indexes,
                                 size_t attribute_count, CuStream stream);
  CuResult (*error_name)(CuResult result, const char** text);
  CuResult (*error_string)(CuResult result, const char** text);

  // Returns null, with a reason, if the library or one of the functions is missing. The library is
  // never unloaded, because its threads may outlive everything here.
  static std::shared_ptr<const CudaApi> load(const std::string& library, std::string& reason);

  // Returns a text such as "out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2)".
  std::string describe(CuResult result) const;
  // Throws SystemError, or OutOfMemory, saying what was tried.
  void check(CuResult result, const std::string& tried) const;
};

// Whether no work can be running any more because its context or the whole driver is gone.
inline bool is_gone(CuResult result) {
  return result == kCuDeinitialized || result == kCuInvalidContext ||
         result == kCuContextIsDestroyed;
}

}  // namespace cxl_offload::gpu

#endif  // CXL_OFFLOAD_GPU_CUDA_API_H_
