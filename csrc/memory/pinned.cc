#include "memory/pinned.h"

#include <utility>

#include "core/error.h"

namespace cxl_offload {
namespace {

class PinnedRegion final : public Region {
 public:
  PinnedRegion(std::unique_ptr<NumaRegion> region, std::shared_ptr<GpuDriver> driver)
      : region_(std::move(region)), driver_(std::move(driver)) {
    driver_->register_host(region_->range());
  }
  ~PinnedRegion() override { driver_->unregister_host(region_->range().data()); }

  std::span<std::byte> range() const override { return region_->range(); }
  size_t page_bytes() const override { return region_->page_bytes(); }
  bool pinned() const override { return true; }
  bool keeps_rule(size_t offset, size_t bytes) const override {
    return moved_bytes_ == 0 && region_->keeps_rule(offset, bytes);
  }
  size_t next_cut(size_t offset) const override { return region_->next_cut(offset); }
  void release(size_t, size_t) override {
    throw InvalidArgument("release a part of a pinned region: it is registered as one");
  }
  std::vector<Run> runs(size_t offset, size_t bytes) const override {
    return region_->runs(offset, bytes);
  }
  std::vector<std::string> notes() const override;

  // Throws PlacementError when pinning moved pages of a strict rule.
  void check(const Rule& rule) {
    moved_bytes_ = region_->strayed_bytes();
    if (moved_bytes_ > 0 && (rule.strict || rule.kind == RuleKind::kBind)) {
      throw PlacementError("pin " + format_bytes(range().size()) + " (" + rule.describe() +
                           "): " + moved_text());
    }
  }

 private:
  std::string moved_text() const {
    return format_bytes(moved_bytes_) +
           " moved to another node, because memory that is online as movable cannot stay pinned; "
           "online the node as online_kernel, or use it as Device-DAX";
  }

  std::unique_ptr<NumaRegion> region_;
  std::shared_ptr<GpuDriver> driver_;
  uint64_t moved_bytes_ = 0;
};

std::vector<std::string> PinnedRegion::notes() const {
  auto notes = region_->notes();
  if (moved_bytes_ > 0) notes.push_back("after pinning, " + moved_text());
  return notes;
}

}  // namespace

PinnedSource::PinnedSource(Placer placer, Rule rule, std::shared_ptr<GpuDriver> driver)
    : source_(std::move(placer), std::move(rule)), driver_(std::move(driver)) {
  if (source_.rule().kind == RuleKind::kFirstTouch) {
    throw InvalidArgument("pin with first touch: pinning faults the pages in at once; name nodes");
  }
}

std::unique_ptr<Region> PinnedSource::obtain(size_t bytes) {
  auto region = std::make_unique<PinnedRegion>(source_.obtain_numa(bytes), driver_);
  region->check(source_.rule());
  return region;
}

}  // namespace cxl_offload
