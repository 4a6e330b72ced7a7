#include "memory/pinned.h"

#include <exception>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"

namespace cxl_offload::memory {
namespace {

using gpu::GpuDriver;
using gpu::StreamId;

// Destroys an event when it dies.
class HeldEvent {
 public:
  HeldEvent(GpuDriver& driver, StreamId stream)
      : driver_(driver), id_(driver.record_event(stream)) {}
  ~HeldEvent() { driver_.destroy_event(id_); }
  HeldEvent(const HeldEvent&) = delete;
  HeldEvent& operator=(const HeldEvent&) = delete;

  void wait() const { driver_.wait_event(id_); }

 private:
  GpuDriver& driver_;
  const gpu::EventId id_;
};

// Returns "4 MiB left node 2 for node 0" and the like. For every node that pages left, it names the
// zone and what to do.
std::string describe(const StrayBytes& strays, const os::Kernel& kernel) {
  std::string text;
  std::string zones;
  os::NodeSet left;
  for (const auto& [way, amount] : strays) {
    text += (text.empty() ? "" : ", ") + format_bytes(amount) + " left node " +
            std::to_string(way.first) +
            (way.second < 0 ? " for no node" : " for node " + std::to_string(way.second));
    if (left.contains(way.first)) continue;
    left.insert(way.first);
    const uint64_t movable = kernel.movable_bytes(way.first);
    zones += "; node " + std::to_string(way.first) +
             (movable > 0 ? " has " + format_bytes(movable) +
                                " in ZONE_MOVABLE, which pinned pages must leave: online it with "
                                "online_kernel, use it as Device-DAX, or accept it with "
                                "strict=False"
                          : " has no ZONE_MOVABLE, so NUMA balancing or demotion moved them: see "
                            "cxl-offload doctor");
  }
  return text + zones;
}

}  // namespace

PinnedRegion::PinnedRegion(std::unique_ptr<Region> region, std::shared_ptr<os::Kernel> kernel,
                           std::shared_ptr<GpuDriver> driver)
    : region_(std::move(region)), kernel_(std::move(kernel)), driver_(std::move(driver)) {
  attach();
}

PinnedRegion::~PinnedRegion() { detach(); }

void PinnedRegion::attach() {
  driver_->register_host(range());
  registered_ = true;
}

void PinnedRegion::detach() noexcept {
  if (registered_.exchange(false)) driver_->unregister_host(range().data());
}

std::optional<std::string> PinnedRegion::try_attach() noexcept {
  try {
    attach();
    return std::nullopt;
  } catch (const std::exception& error) {
    return error.what();
  }
}

void PinnedRegion::release(size_t, size_t) {
  throw InvalidArgument("release a part of a pinned region: it is registered as one");
}

std::vector<std::string> PinnedRegion::notes() const {
  auto notes = region_->notes();
  const std::lock_guard lock(notes_mutex_);
  notes.insert(notes.end(), notes_.begin(), notes_.end());
  return notes;
}

// Counts pages that pinning moved where they are, and says what moved.
std::string PinnedRegion::settle() {
  const StrayBytes moved = strays();
  if (moved.empty()) return "";
  accept_strays();
  return describe(moved, *kernel_);
}

PinnedRegion::Reading PinnedRegion::settle_again() noexcept {
  try {
    const std::string moved = settle();
    return {moved.empty() ? "" : "when it was pinned again, " + moved, false};
  } catch (const std::exception& error) {
    return {std::string("where it is after pinning could not be read: ") + error.what(), true};
  }
}

void PinnedRegion::check(const Rule& rule) {
  const std::string moved = settle();
  if (moved.empty()) return;
  if (rule.strict) {
    throw PlacementError("pin " + format_bytes(range().size()) + " (" + rule.describe() +
                         "): " + moved);
  }
  const std::lock_guard lock(notes_mutex_);
  notes_.push_back("when it was pinned, " + moved);
}

void PinnedRegion::quiesce(std::span<const StreamId> streams) {
  if (streams.empty()) return driver_->synchronize();
  try {
    for (const StreamId stream : streams) HeldEvent(*driver_, stream).wait();
  } catch (...) {  // a stream may be gone; then wait as if none had been named
    driver_->synchronize();
  }
}

std::optional<std::string> PinnedRegion::attach_again() {
  auto refused = try_attach();
  const Reading reading = refused ? Reading{} : settle_again();
  const std::lock_guard lock(notes_mutex_);
  notes_.clear();
  if (!reading.note.empty()) notes_.push_back(reading.note);
  if (refused) notes_.push_back("not pinned since a move that failed: " + *refused);
  return refused;
}

Moved PinnedRegion::move(size_t offset, size_t bytes, const MoveRequest& request) {
  if (offset != 0 || bytes != range().size()) {
    throw InvalidArgument("move a part of a pinned region: it is registered as one");
  }
  quiesce(request.streams);
  detach();
  Moved moved;
  try {
    moved = region_->move(0, bytes, request);
  } catch (const Interrupted&) {
    attach_again();
    throw;
  } catch (const std::exception& error) {
    const auto refused = attach_again();
    if (!refused) throw;
    return {
        .arrived = false,
        .failure = std::string(error.what()) + "; and it could not be pinned again: " + *refused};
  }
  if (const auto refused = try_attach()) {
    moved.failure = "the pages are on their new nodes and not pinned any more: " + *refused +
                    "; unpin other memory and move it again";
    moved.notes.push_back("not pinned since it was moved: " + *refused);
    const std::lock_guard lock(notes_mutex_);
    notes_.clear();
    return moved;
  }
  const Reading reading = settle_again();
  if (reading.unknown || (!reading.note.empty() && request.rule.strict)) {
    return go_back(request, reading.note);
  }
  if (!reading.note.empty()) moved.notes.push_back(reading.note);
  const std::lock_guard lock(notes_mutex_);
  notes_.clear();
  return moved;
}

Moved PinnedRegion::go_back(const MoveRequest& request, const std::string& why) {
  const InterruptScope to_the_end({});
  const std::string failure = request.rule.describe() + ": " + why;
  std::vector<std::string> left;
  detach();
  try {
    left = region_->move(0, range().size(), {request.origin}).notes;
  } catch (const std::exception& error) {
    left.push_back(std::string("not back where it was after a move that failed: ") + error.what());
  }
  const auto refused = try_attach();
  if (refused) left.push_back("not pinned since a move that failed: " + *refused);
  const Reading reading = refused ? Reading{} : settle_again();
  if (!reading.note.empty()) left.push_back(reading.note);
  std::string state;
  for (const std::string& note : left) state += "; " + note;
  const std::lock_guard lock(notes_mutex_);
  notes_ = std::move(left);
  return {.arrived = false,
          .failure = failure + (state.empty() ? "; it is back where it was" : state)};
}

PinnedSource::PinnedSource(std::shared_ptr<RegionSource> source, std::shared_ptr<os::Kernel> kernel,
                           Rule rule, std::shared_ptr<GpuDriver> driver)
    : source_(std::move(source)),
      kernel_(std::move(kernel)),
      rule_(std::move(rule)),
      driver_(std::move(driver)) {
  if (rule_.kind == RuleKind::kFirstTouch) {
    throw InvalidArgument("pin with first touch: pinning faults the pages in at once; name nodes");
  }
}

std::unique_ptr<Region> PinnedSource::obtain(size_t bytes) {
  auto region = std::make_unique<PinnedRegion>(source_->obtain(bytes), kernel_, driver_);
  region->check(rule_);
  return region;
}

}  // namespace cxl_offload::memory
