// A bounded ring of pinned slots for bytes that the GPU cannot reach by itself.
#ifndef CXL_OFFLOAD_TRANSFER_STAGING_H_
#define CXL_OFFLOAD_TRANSFER_STAGING_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "gpu/driver.h"
#include "transfer/host_copy.h"

namespace cxl_offload::transfer {

// Only one thread at a time may use it.
class Staging {
 public:
  // `memory` is pinned, belongs to the caller and is cut into slots of `slot_bytes`.
  Staging(std::shared_ptr<gpu::GpuDriver> driver, std::shared_ptr<HostCopier> copier,
          std::span<std::byte> memory, size_t slot_bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  size_t slots() const { return slots_.size(); }
  // Sends a chunk of at most a slot from ordinary memory to the GPU. It is copied into a slot at
  // once, so the source may change after the return.
  void send(uint64_t device, const std::byte* host, size_t bytes, gpu::StreamId stream);
  // Receives a chunk from the GPU. The bytes are in `host` only after land().
  void receive(std::byte* host, uint64_t device, size_t bytes, gpu::StreamId stream);
  // Waits for everything that was received.
  void land();
  // Drops what was received and has not landed. Slots stay taken until the copies that use them,
  // also those of other transfers, are done.
  void drop_received() noexcept;

 private:
  struct Slot {
    std::byte* at = nullptr;
    gpu::EventId event = 0;     // behind the slot's copy; 0 if it is free
    std::byte* host = nullptr;  // where the bytes go when they have come
    size_t bytes = 0;
  };

  Slot& take();
  void settle(Slot& slot);

  const std::shared_ptr<gpu::GpuDriver> driver_;
  const std::shared_ptr<HostCopier> copier_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_STAGING_H_
