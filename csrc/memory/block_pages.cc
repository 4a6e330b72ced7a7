// Asks the pages of a block again, long after they were placed.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/rounding.h"
#include "memory/fault_in.h"
#include "memory/pinned.h"
#include "memory/session.h"
#include "os/memory_failure.h"

namespace cxl_offload::memory {
namespace {

// Returns the runs of `found` that `wanted` has on another node. Pages that are not there are on no
// node.
std::vector<Stray> differences(std::span<std::byte> pages, const std::vector<Run>& wanted,
                               const std::vector<Run>& found) {
  const RunMap placed(wanted);
  std::vector<Stray> strays;
  for (const Run& run : found) {
    if (run.node < 0) continue;
    for (const Run& part : placed.slice(run.offset, run.bytes)) {
      if (part.node == run.node) continue;
      strays.push_back(
          {pages.subspan(run.offset + part.offset, part.bytes), part.node, run.node, false});
    }
  }
  return strays;
}

bool is_among(const Stray& stray, const std::vector<Stray>& others) {
  return std::ranges::any_of(others, [&](const Stray& other) {
    return other.pages.data() < stray.pages.data() + stray.pages.size() &&
           stray.pages.data() < other.pages.data() + other.pages.size();
  });
}

// The sessions of this process. The list is never destroyed, because blocks may be dropped while
// the process exits. A forked child makes a list of its own, since a thread that it does not have
// may hold the lock.
struct Sessions {
  ForkGuard guard;
  std::mutex mutex;
  std::vector<std::weak_ptr<Session>> live;
};

Sessions& sessions() {
  static std::atomic<Sessions*> list{new Sessions};
  Sessions* found = list.load();
  while (found->guard.in_child()) {
    auto* own = new Sessions;
    if (list.compare_exchange_strong(found, own)) return *own;
    delete own;
  }
  return *found;
}

}  // namespace

AskedPages PlacedBlock::ask_pages(bool bring_back) {
  session_->guard_.refuse_in_child("ask the pages of an allocation");
  const std::lock_guard moving(moving_);
  Region& region = *memory_->region();
  // A small block shares its page with others, which are placed alike.
  const size_t page = page_bytes();
  const size_t first = memory_->offset() / page * page;
  const size_t end =
      std::min(round_up(memory_->offset() + memory_->capacity(), page), region.range().size());
  const auto pages = region.range().subspan(first, end - first);
  AskedPages asked;
  asked.lost = os::find_lost_pages(pages, page);
  const auto wanted = region.runs(first, pages.size());
  if (wanted.empty()) return asked;
  os::Kernel& kernel = *session_->placer_.kernel;
  asked.strays = differences(pages, wanted, look_for_runs(kernel, pages, page));
  if (asked.strays.empty() || !bring_back || region.pinned()) return asked;
  try {
    move_to_runs(kernel, pages, wanted, page);
  } catch (const SystemError& error) {
    if (error.code() != ENODEV) throw;  // a node that is offline takes nothing back
  }
  const auto left = differences(pages, wanted, look_for_runs(kernel, pages, page));
  for (Stray& stray : asked.strays) stray.is_back = !is_among(stray, left);
  return asked;
}

void Session::remember(std::weak_ptr<Session> session) {
  Sessions& all = sessions();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.live, [](const std::weak_ptr<Session>& each) { return each.expired(); });
  all.live.push_back(std::move(session));
}

std::shared_ptr<PlacedBlock> find_block(const std::byte* address) {
  std::vector<std::weak_ptr<Session>> live;
  {
    Sessions& all = sessions();
    const std::lock_guard lock(all.mutex);
    live = all.live;
  }
  for (const auto& each : live) {
    const auto session = each.lock();
    if (auto block = session ? session->find(address) : nullptr) return block;
  }
  return nullptr;
}

std::vector<std::shared_ptr<PlacedBlock>> Session::blocks() const {
  std::vector<std::shared_ptr<PlacedBlock>> found;
  if (guard_.in_child()) return found;
  const std::lock_guard lock(blocks_mutex_);
  found.reserve(blocks_.size());
  for (const auto& [address, block] : blocks_) {
    if (auto live = block.lock()) found.push_back(std::move(live));
  }
  return found;
}

}  // namespace cxl_offload::memory
