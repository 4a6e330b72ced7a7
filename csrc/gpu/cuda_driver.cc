#include "gpu/cuda_driver.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

#include "core/error.h"
#include "gpu/cuda_api.h"
#include "gpu/cuda_current.h"

namespace cxl_offload::gpu {

// The contexts in use. Primary contexts are held while this lives.
class CudaDriver::Contexts {
 public:
  explicit Contexts(CudaDriver& driver) : api_(*driver.api_) {
    {
      const std::lock_guard lock(driver.mutex_);
      for (const auto& [address, context] : driver.registered_) add(context);
    }
    int count = 0;
    if (api_.device_get_count(&count) != kCuSuccess) return;
    held_.reserve(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) hold_primary(i);
  }
  ~Contexts() {
    for (const CuDevice device : held_) api_.primary_release(device);
  }
  Contexts(const Contexts&) = delete;
  Contexts& operator=(const Contexts&) = delete;

  const std::vector<CuContext>& all() const { return all_; }

 private:
  void add(CuContext context) {
    if (std::find(all_.begin(), all_.end(), context) == all_.end()) all_.push_back(context);
  }

  void hold_primary(int ordinal) {
    CuDevice device = 0;
    unsigned flags = 0;
    int active = 0;
    CuContext context = nullptr;
    if (api_.device_get(&device, ordinal) != kCuSuccess ||
        api_.primary_state(device, &flags, &active) != kCuSuccess || active == 0 ||
        api_.primary_retain(&context, device) != kCuSuccess) {
      return;
    }
    held_.push_back(device);
    add(context);
  }

  const CudaApi& api_;
  std::vector<CuContext> all_;
  std::vector<CuDevice> held_;
};

// What an EventId points to: one event, or an event for the default stream of each context.
struct CudaDriver::Mark {
  explicit Mark(const CudaApi& calls) : api(calls) {}
  ~Mark() {
    for (CuEvent event : events) api.event_destroy(event);
  }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  // Records on the stream in the current context.
  void record(CuStream stream) {
    events.reserve(events.size() + 1);
    CuEvent event = nullptr;
    api.check(api.event_create(&event, kCuEventDisableTiming), "cuEventCreate");
    events.push_back(event);
    api.check(api.event_record(event, stream), "cuEventRecord");
  }

  const CudaApi& api;
  std::vector<CuEvent> events;
};

CudaDriver::Opened CudaDriver::open(const std::string& library) {
  std::string reason;
  auto api = CudaApi::load(library, reason);
  if (api == nullptr) return {nullptr, reason};
  if (const CuResult result = api->init(0); result != kCuSuccess) {
    return {nullptr, "cuInit: " + api->describe(result)};
  }
  int count = 0;
  if (const CuResult result = api->device_get_count(&count); result != kCuSuccess) {
    return {nullptr, "cuDeviceGetCount: " + api->describe(result)};
  }
  if (count == 0) return {nullptr, "the driver finds no GPU"};
  return {std::make_shared<CudaDriver>(std::move(api)), ""};
}

CudaDriver::CudaDriver(std::shared_ptr<const CudaApi> api) : api_(std::move(api)) {}

CudaDriver::~CudaDriver() = default;

void* CudaDriver::context_in_use(const Contexts& contexts) const {
  CuContext context = nullptr;
  const CuResult asked = api_->context_current(&context);
  if (asked == kCuSuccess && context != nullptr) return context;
  return contexts.all().empty() ? nullptr : contexts.all().front();
}

void CudaDriver::register_host(std::span<std::byte> range) {
  refuse_in_child();
  const std::string what = "pin " + format_bytes(range.size());
  const Contexts contexts(*this);
  CuContext context = context_in_use(contexts);
  if (context == nullptr) {
    throw InvalidArgument(what +
                          ": no CUDA context is in use; run any CUDA operation first, for example "
                          "torch.zeros(1, device=\"cuda\")");
  }
  const Current current(*api_, context);
  api_->check(current.result(), what + ": cuCtxPushCurrent");
  bool is_new = false;
  {
    const std::lock_guard lock(mutex_);
    is_new = registered_.emplace(range.data(), context).second;
  }
  const CuResult result = api_->host_register(range.data(), range.size(), kCuHostRegisterPortable);
  if (result == kCuSuccess) return;
  if (is_new) {
    const std::lock_guard lock(mutex_);
    registered_.erase(range.data());
  }
  api_->check(result, what + ": cuMemHostRegister");
}

void CudaDriver::unregister_host(std::byte* address) noexcept {
  if (in_child()) return;
  CuContext context = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = registered_.find(address);
    if (found == registered_.end()) return;
    context = found->second;
    registered_.erase(found);
  }
  // When the context is gone, the registration is too.
  const Current current(*api_, context);
  if (current.result() == kCuSuccess) api_->host_unregister(address);
}

EventId CudaDriver::record_event(StreamId stream) {
  refuse_in_child();
  if (stream == kPerThreadDefaultStream) {
    throw InvalidArgument(
        "record event: the per-thread default stream is another one in each "
        "thread; name a stream");
  }
  auto mark = std::make_unique<Mark>(*api_);
  if (stream <= kLegacyDefaultStream) {
    const Contexts contexts(*this);
    for (CuContext context : contexts.all()) {
      const Current current(*api_, context);
      if (is_gone(current.result())) continue;
      api_->check(current.result(), "record event: cuCtxPushCurrent");
      mark->record(nullptr);
    }
  } else {
    CuContext context = nullptr;
    int capturing = 0;
    api_->check(api_->stream_context(stream_of(stream), &context), "record event: cuStreamGetCtx");
    const Current current(*api_, context);
    api_->check(current.result(), "record event: cuCtxPushCurrent");
    api_->check(api_->stream_is_capturing(stream_of(stream), &capturing),
                "record event: cuStreamIsCapturing");
    if (capturing != 0) {
      throw SystemError(EBUSY, "record event: the stream is being captured into a graph");
    }
    mark->record(stream_of(stream));
  }
  return reinterpret_cast<EventId>(mark.release());
}

bool CudaDriver::event_done(EventId event) noexcept {
  if (in_child()) return true;
  for (CuEvent one : reinterpret_cast<const Mark*>(event)->events) {
    const CuResult result = api_->event_query(one);
    // Waiting for the event reports any other error.
    if (result != kCuSuccess && !is_gone(result)) return false;
  }
  return true;
}

void CudaDriver::wait_event(EventId event) {
  refuse_in_child();
  for (CuEvent one : reinterpret_cast<const Mark*>(event)->events) {
    const CuResult result = api_->event_synchronize(one);
    if (!is_gone(result)) api_->check(result, "wait for the GPU: cuEventSynchronize");
  }
}

void CudaDriver::destroy_event(EventId event) noexcept {
  if (in_child()) return;
  delete reinterpret_cast<Mark*>(event);
}

StreamId CudaDriver::create_stream() {
  refuse_in_child();
  const Contexts contexts(*this);
  CuContext context = context_in_use(contexts);
  if (context == nullptr) {
    throw InvalidArgument(
        "create stream: no CUDA context is in use; run any CUDA operation first, for example "
        "torch.zeros(1, device=\"cuda\")");
  }
  const Current current(*api_, context);
  api_->check(current.result(), "create stream: cuCtxPushCurrent");
  CuStream stream = nullptr;
  api_->check(api_->stream_create(&stream, kCuStreamNonBlocking), "cuStreamCreate");
  return reinterpret_cast<uintptr_t>(stream);
}

void CudaDriver::stream_wait(StreamId stream, EventId event) {
  refuse_in_child();
  const InStream current(*api_, stream, "stream wait");
  for (CuEvent one : reinterpret_cast<const Mark*>(event)->events) {
    api_->check(api_->stream_wait_event(stream_of(stream), one, 0), "cuStreamWaitEvent");
  }
}

void CudaDriver::synchronize() {
  refuse_in_child();
  const Contexts contexts(*this);
  for (CuContext context : contexts.all()) {
    const Current current(*api_, context);
    const CuResult result =
        current.result() == kCuSuccess ? api_->context_synchronize() : current.result();
    if (!is_gone(result)) api_->check(result, "wait for the GPU: cuCtxSynchronize");
  }
}

}  // namespace cxl_offload::gpu
