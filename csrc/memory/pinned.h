// Pinned regions: registered as a whole with the GPU driver, and looked at again afterwards,
// because a long-term pin moves pages out of movable memory.
#ifndef CXL_OFFLOAD_MEMORY_PINNED_H_
#define CXL_OFFLOAD_MEMORY_PINNED_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gpu/driver.h"
#include "memory/region.h"
#include "memory/rule.h"
#include "os/kernel.h"

namespace cxl_offload::memory {

class PinnedRegion final : public Region {
 public:
  // Registers a region. Throws what the driver throws.
  PinnedRegion(std::unique_ptr<Region> region, std::shared_ptr<os::Kernel> kernel,
               std::shared_ptr<gpu::GpuDriver> driver);
  ~PinnedRegion() override;

  std::span<std::byte> range() const override { return region_->range(); }
  size_t page_bytes() const override { return region_->page_bytes(); }
  size_t unit_bytes() const override { return region_->unit_bytes(); }
  bool pinned() const override { return true; }
  bool registered() const override { return registered_; }
  bool keeps_rule(size_t offset, size_t bytes) const override {
    return registered_ && region_->keeps_rule(offset, bytes);
  }
  size_t next_cut(size_t offset) const override { return region_->next_cut(offset); }
  void release(size_t offset, size_t bytes) override;
  std::vector<Run> runs(size_t offset, size_t bytes) const override {
    return region_->runs(offset, bytes);
  }
  std::string device() const override { return region_->device(); }
  std::vector<std::string> notes() const override;
  std::string why_fixed() const override { return region_->why_fixed(); }
  // Unregisters all of it, moves, registers and reads the placement again. If the rule is strict
  // and pinning moves pages away, goes back to the rule `origin`. No work that uses the memory may
  // be queued meanwhile. What it throws leaves the pages back and pinned.
  Moved move(size_t offset, size_t bytes, const MoveRequest& request) override;
  StrayBytes strays() const override { return region_->strays(); }
  void accept_strays() override { region_->accept_strays(); }

  // Reads the placement again. Pages that pinning moved are counted where they are and noted;
  // throws PlacementError instead if `strict`.
  void check(const Rule& rule);

 private:
  void quiesce(std::span<const gpu::StreamId> streams);
  void attach();
  void detach() noexcept;
  std::optional<std::string> try_attach() noexcept;
  std::string settle();
  // What settle() says; `unknown` if the kernel does not say where the pages are.
  struct Reading {
    std::string note;
    bool unknown = false;
  };
  Reading settle_again() noexcept;
  // After a move that failed: registers the pages where they are, and notes what came of it.
  // Returns what the driver said if it refused.
  std::optional<std::string> attach_again();
  Moved go_back(const MoveRequest& request, const std::string& why);

  const std::unique_ptr<Region> region_;
  const std::shared_ptr<os::Kernel> kernel_;
  const std::shared_ptr<gpu::GpuDriver> driver_;
  std::atomic<bool> registered_ = false;
  mutable std::mutex notes_mutex_;  // guards notes_
  std::vector<std::string> notes_;
};

class PinnedSource final : public RegionSource {
 public:
  PinnedSource(std::shared_ptr<RegionSource> source, std::shared_ptr<os::Kernel> kernel, Rule rule,
               std::shared_ptr<gpu::GpuDriver> driver);
  size_t page_bytes() const override { return source_->page_bytes(); }
  std::unique_ptr<Region> obtain(size_t bytes) override;

 private:
  const std::shared_ptr<RegionSource> source_;
  const std::shared_ptr<os::Kernel> kernel_;
  const Rule rule_;
  const std::shared_ptr<gpu::GpuDriver> driver_;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_PINNED_H_
