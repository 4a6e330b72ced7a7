// Regions on Device-DAX devices: pieces of a device that are mapped side by side. Their memory
// belongs to no node, and pinning never moves it.
#ifndef CXL_OFFLOAD_MEMORY_DAX_REGION_H_
#define CXL_OFFLOAD_MEMORY_DAX_REGION_H_

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "memory/node_budget.h"
#include "memory/region.h"
#include "os/dax_device.h"

namespace cxl_offload::memory {

// The free pieces of one claimed device. Thread-safe.
class DaxStore {
 public:
  // `capacity_bytes` is what may be taken of it; nothing means all.
  DaxStore(std::unique_ptr<os::DaxDevice> device, std::optional<uint64_t> capacity_bytes);

  os::DaxDevice& device() const { return *device_; }
  // Takes pieces with `bytes` in total, which is a multiple of the alignment. They are the smallest
  // hole that is large enough, or several holes where none is. Throws OutOfMemory naming the
  // device.
  std::vector<os::DaxPiece> take(size_t bytes);
  void give_back(os::DaxPiece piece) noexcept;
  NodeUse use() const;
  size_t hole_count() const;

 private:
  const std::unique_ptr<os::DaxDevice> device_;
  const uint64_t capacity_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> holes_;  // offset -> bytes, neither touching nor empty
  NodeUse use_;
};

class DaxRegion final : public Region {
 public:
  // Maps `bytes`, rounded up to whole pages of the device, all of them there. Throws OutOfMemory or
  // SystemError; on throw nothing is left.
  DaxRegion(std::shared_ptr<DaxStore> store, size_t bytes);
  ~DaxRegion() override;
  DaxRegion(const DaxRegion&) = delete;
  DaxRegion& operator=(const DaxRegion&) = delete;

  std::span<std::byte> range() const override { return {address_, bytes_}; }
  size_t page_bytes() const override { return store_->device().align_bytes(); }
  bool pinned() const override { return false; }
  bool keeps_rule(size_t, size_t) const override { return true; }
  size_t next_cut(size_t offset) const override;
  void release(size_t offset, size_t bytes) override;
  std::string device() const override { return store_->device().name(); }
  std::string why_fixed() const override {
    return "it is on device " + device() + ", whose memory does not move";
  }

 private:
  void cut_at(size_t offset);
  void unmap(size_t offset, const os::DaxPiece& piece) noexcept;

  const std::shared_ptr<DaxStore> store_;
  const size_t bytes_;
  std::byte* address_ = nullptr;
  std::mutex mutex_;                       // guards pieces_
  std::map<size_t, os::DaxPiece> pieces_;  // by offset in the region
};

class DaxSource final : public RegionSource {
 public:
  explicit DaxSource(std::shared_ptr<DaxStore> store) : store_(std::move(store)) {}
  size_t page_bytes() const override { return store_->device().align_bytes(); }
  std::unique_ptr<Region> obtain(size_t bytes) override {
    return std::make_unique<DaxRegion>(store_, bytes);
  }

 private:
  const std::shared_ptr<DaxStore> store_;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_DAX_REGION_H_
