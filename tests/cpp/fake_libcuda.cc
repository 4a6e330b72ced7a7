#include "fake_libcuda.h"

#include <cstring>
#include <sstream>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400,
              kNotReady = 600, kDestroyed = 709, kAlreadyRegistered = 712, kNotRegistered = 713;

FakeCuda& cuda() {
  static FakeCuda state;
  return state;
}

struct Event {
  uintptr_t context;
  bool recorded = false;
};

uintptr_t number(void* handle) { return reinterpret_cast<uintptr_t>(handle); }
uintptr_t here() { return cuda().current.empty() ? 0 : cuda().current.back(); }

// Writes the call down; true if it is to return `result` at once.
template <class... Args>
bool refused(int& result, const char* name, Args... args) {
  std::ostringstream line;
  line << name << std::hex;
  ((line << ' ' << args), ...);
  cuda().calls.push_back(line.str());
  const auto found = cuda().results.find(name);
  if (found == cuda().results.end()) return false;
  result = found->second;
  return true;
}

}  // namespace

extern "C" {

FakeCuda* fake_cuda() { return &cuda(); }

int cuInit(unsigned flags) {
  int result = kSuccess;
  if (refused(result, "cuInit", flags)) return result;
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  int result = kSuccess;
  if (refused(result, "cuDeviceGetCount")) return result;
  *count = cuda().gpus;
  return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = 70 + ordinal;  // an ordinal is not a device
  return kSuccess;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = cuda().active.count(static_cast<uintptr_t>(device - 69) * 0x1000) > 0 ? 1 : 0;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  const uintptr_t primary = static_cast<uintptr_t>(device - 69) * 0x1000;
  cuda().calls.push_back(cuda().active.count(primary) > 0 ? "retain" : "CREATED A CONTEXT");
  *context = reinterpret_cast<void*>(primary);
  ++cuda().retained;
  return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int) {
  --cuda().retained;
  return kSuccess;
}

int cuCtxCreate_v2(void**, unsigned, int) {
  cuda().calls.push_back("CREATED A CONTEXT");
  return kInvalidValue;
}

int cuCtxGetCurrent(void** context) {
  int result = kSuccess;
  if (refused(result, "cuCtxGetCurrent")) return result;
  *context = reinterpret_cast<void*>(here());
  return kSuccess;
}

int cuCtxPushCurrent_v2(void* context) {
  int result = kSuccess;
  if (refused(result, "cuCtxPushCurrent", number(context))) return result;
  if (cuda().destroyed.count(number(context)) > 0) return kDestroyed;
  cuda().current.push_back(number(context));
  return kSuccess;
}

int cuCtxPopCurrent_v2(void** context) {
  if (cuda().current.empty()) return kInvalidContext;
  *context = reinterpret_cast<void*>(here());
  cuda().current.pop_back();
  return kSuccess;
}

int cuCtxSynchronize() {
  int result = kSuccess;
  if (refused(result, "cuCtxSynchronize", here())) return result;
  if (here() == 0) return kInvalidContext;
  cuda().busy.erase(here());
  return kSuccess;
}

int cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  int result = kSuccess;
  if (refused(result, "cuMemHostRegister", here(), flags)) return result;
  if (here() == 0) return kInvalidContext;
  return cuda().registered.emplace(address, bytes).second ? kSuccess : kAlreadyRegistered;
}

int cuMemHostUnregister(void* address) {
  int result = kSuccess;
  if (refused(result, "cuMemHostUnregister", here())) return result;
  return cuda().registered.erase(address) > 0 ? kSuccess : kNotRegistered;
}

int cuStreamGetCtx(void* stream, void** context) {
  int result = kSuccess;
  if (refused(result, "cuStreamGetCtx", number(stream))) return result;
  *context = reinterpret_cast<void*>(number(stream) & ~uintptr_t{0xfff});
  return kSuccess;
}

int cuStreamIsCapturing(void* stream, int* capturing) {
  *capturing = cuda().capturing.count(number(stream)) > 0 ? 1 : 0;
  return kSuccess;
}

int cuEventCreate(void** event, unsigned flags) {
  int result = kSuccess;
  if (refused(result, "cuEventCreate", here(), flags)) return result;
  if (here() == 0) return kInvalidContext;
  *event = new Event{here()};
  ++cuda().live_events;
  return kSuccess;
}

int cuEventRecord(void* event, void* stream) {
  int result = kSuccess;
  if (refused(result, "cuEventRecord", here(), number(stream))) return result;
  auto* recorded = static_cast<Event*>(event);
  const uintptr_t context = number(stream) >= 0x1000 ? number(stream) & ~uintptr_t{0xfff} : here();
  if (context != recorded->context) return kInvalidHandle;
  recorded->recorded = true;
  return kSuccess;
}

int cuEventQuery(void* event) {
  int result = kSuccess;
  if (refused(result, "cuEventQuery")) return result;
  return cuda().busy.count(static_cast<Event*>(event)->context) > 0 ? kNotReady : kSuccess;
}

int cuEventSynchronize(void* event) {
  int result = kSuccess;
  if (refused(result, "cuEventSynchronize")) return result;
  cuda().busy.erase(static_cast<Event*>(event)->context);
  return kSuccess;
}

int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  --cuda().live_events;
  return kSuccess;
}

int cuStreamCreate(void** stream, unsigned flags) {
  int result = kSuccess;
  if (refused(result, "cuStreamCreate", here(), flags)) return result;
  if (here() == 0) return kInvalidContext;
  *stream = reinterpret_cast<void*>(here() + 0x10 * static_cast<uintptr_t>(++cuda().streams));
  return kSuccess;
}

int cuStreamDestroy_v2(void* stream) {
  int result = kSuccess;
  if (refused(result, "cuStreamDestroy", number(stream))) return result;
  return kSuccess;
}

int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  int result = kSuccess;
  if (refused(result, "cuStreamWaitEvent", here(), number(stream))) return result;
  return static_cast<Event*>(event)->recorded ? kSuccess : kInvalidHandle;
}

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t bytes, void* stream) {
  int result = kSuccess;
  if (refused(result, "cuMemcpyAsync", here(), number(stream), bytes)) return result;
  std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes);
  return kSuccess;
}

int cuMemcpyBatchAsync_v2(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                          void* attributes, size_t* indexes, size_t attribute_count, void* stream) {
  int result = kSuccess;
  if (refused(result, "cuMemcpyBatchAsync", here(), number(stream), count)) return result;
  const bool in_stream_order = *static_cast<int*>(attributes) == 1;
  if (!in_stream_order || attribute_count != 1 || indexes[0] != 0) return kInvalidValue;
  for (size_t i = 0; i < count; ++i) {
    std::memmove(reinterpret_cast<void*>(targets[i]), reinterpret_cast<void*>(sources[i]),
                 sizes[i]);
  }
  return kSuccess;
}

int cuGetErrorName(int result, const char** text) {
  *text = "CUDA_ERROR_FAKE";
  return result > 1000 ? kInvalidValue : kSuccess;
}

int cuGetErrorString(int result, const char** text) {
  *text = "a fake error";
  return result > 1000 ? kInvalidValue : kSuccess;
}

}  // extern "C"
