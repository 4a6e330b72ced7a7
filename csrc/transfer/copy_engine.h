// Copies bytes between host tiers and a GPU before they are needed.
//
// A direction is a queue of its own: transfers to the device do not wait for those to the host.
// Inside a direction every lane (node) has a stream, so that a slow tier's chunks are under way
// together with a fast one's. Pinned bytes are copied by the GPU where they lie; others go through
// a bounded ring of pinned slots, filled and emptied by a thread of the direction.
#ifndef CXL_OFFLOAD_TRANSFER_COPY_ENGINE_H_
#define CXL_OFFLOAD_TRANSFER_COPY_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "core/fork_guard.h"
#include "gpu/driver.h"
#include "transfer/chunk_plan.h"
#include "transfer/copy_handle.h"
#include "transfer/host_copy.h"

namespace cxl_offload::transfer {

enum class Direction { kToDevice, kToHost };

// What went over one lane in one direction. It is counted when it is handed to the GPU.
struct LinkUse {
  uint64_t bytes = 0;
  uint64_t copies = 0;
  uint64_t staged_bytes = 0;  // of `bytes`, those that went through a slot
};

struct EngineOptions {
  size_t chunk_bytes = size_t{4} << 20;  // also the size of a slot
  // The most unfinished bytes in a direction. A larger transfer goes alone.
  size_t limit_bytes = size_t{1} << 30;
  std::map<Lane, double> rates;  // bytes/s, for the order of chunks
};

// Thread-safe. A forked child can only drop it; everything else throws InvalidArgument there.
class CopyEngine {
 public:
  // `staging` is pinned and stays valid as long as the engine; each direction takes a half. Empty:
  // bytes that are not pinned are refused. Streams are made in the calling thread's context or one
  // in use. Throws InvalidArgument.
  CopyEngine(std::shared_ptr<gpu::GpuDriver> driver, std::shared_ptr<HostCopier> copier,
             std::span<std::byte> staging, EngineOptions options);
  // Waits for all transfers.
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Queues a transfer behind the work that the streams `after` have queued now. Both ends must stay
  // as they are until it has finished. Where more than the limit is unfinished it waits for the
  // oldest transfers or, without `may_wait`, returns null. Throws InvalidArgument for bytes that
  // are not pinned without staging.
  std::shared_ptr<CopyHandle> submit(Direction direction, std::vector<Piece> pieces,
                                     const std::vector<gpu::StreamId>& after, bool may_wait);
  // Waits for all transfers submitted so far. Failures are reported by their handles.
  void drain();
  std::map<Lane, LinkUse> use(Direction direction) const;
  // Transfers that were submitted and not seen to finish yet.
  size_t unfinished_bytes(Direction direction) const;
  // The streams made so far, for callers that must record them.
  std::vector<gpu::StreamId> streams() const;
  bool in_child() const { return queues_.in_child(); }

 private:
  class Queue;
  struct Queues;

  static std::unique_ptr<Queues> make_queues(const std::shared_ptr<gpu::GpuDriver>& driver,
                                             const std::shared_ptr<HostCopier>& copier,
                                             std::span<std::byte> staging,
                                             const EngineOptions& options);

  const ProcessOwned<Queues> queues_;
};

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_COPY_ENGINE_H_
