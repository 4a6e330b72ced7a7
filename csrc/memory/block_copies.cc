#include "memory/block_copies.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/error.h"

namespace cxl_offload::memory {
namespace {

// How many first copies are alive.
std::atomic<size_t> with_copies = 0;

}  // namespace

bool any_copies() noexcept { return with_copies.load(std::memory_order_relaxed) > 0; }

std::shared_ptr<PlacedBlock> find_first_copy(const std::byte* address) {
  if (!any_copies()) return nullptr;
  auto block = find_block(address);
  return block && block->is_first_copy() ? block : nullptr;
}

void PlacedBlock::own(std::vector<std::shared_ptr<PlacedBlock>> others) {
  others_ = std::move(others);
  is_copy_ = true;
  for (const auto& other : others_) {
    other->first_ = weak_from_this();
    other->is_copy_ = true;
  }
  ++with_copies;
}

void PlacedBlock::count_out() noexcept {
  if (is_first_copy()) --with_copies;
}

std::vector<std::shared_ptr<PlacedBlock>> PlacedBlock::copies() const {
  const auto first = is_first_copy() ? shared_from_this() : first_.lock();
  if (!first) return {};
  std::vector<std::shared_ptr<PlacedBlock>> all{std::const_pointer_cast<PlacedBlock>(first)};
  all.insert(all.end(), first->others_.begin(), first->others_.end());
  return all;
}

const std::byte* PlacedBlock::near_copy(const std::byte* at, os::NodeId node) const {
  const auto found = nearest_.find(node);
  if (found == nearest_.end() || found->second == 0) return at;
  return others_[found->second - 1]->range().data() + (at - range().data());
}

// Finds which copy is the nearest to every node. It does so once, because asking the kernel takes
// longer than reading a small weight.
void PlacedBlock::find_nearest(const std::vector<Share>& copies) {
  const os::Kernel& kernel = session_->kernel();
  for (const os::NodeId node : kernel.allowed_nodes().nodes()) {
    std::vector<os::NodeId> order{node};
    for (const os::NodeId other : kernel.fallback_order(node)) order.push_back(other);
    for (const os::NodeId near : order) {
      const auto copy = std::ranges::find(copies, near, &Share::node);
      if (copy == copies.end()) continue;
      nearest_[node] = static_cast<size_t>(copy - copies.begin());
      break;
    }
  }
}

// Each copy is a block of its own, so that it is counted, asked and given back as any other. If one
// copy has no room, none is made.
std::shared_ptr<PlacedBlock> Session::allocate_copies(size_t bytes, const Rule& rule) {
  std::vector<std::shared_ptr<PlacedBlock>> copies;
  try {
    for (const Share& share : rule.shares) {
      Rule one = rule;
      one.kind = RuleKind::kBind;
      one.shares = {share};
      copies.push_back(allocate_one(bytes, std::move(one), nullptr));
    }
  } catch (const OutOfMemory& error) {
    copies.clear();
    for (const auto& pool : pools())
      pool->give_back();  // otherwise pools would keep the memory of copies
    throw OutOfMemory(format_bytes(bytes) + " with " + rule.describe() + ": " + error.what());
  }
  for (const auto& copy : copies) copy->rule_ = rule;
  auto first = copies.front();
  first->find_nearest(rule.shares);
  first->own({copies.begin() + 1, copies.end()});
  for (const auto& copy : copies) make_known(copy);
  return first;
}

}  // namespace cxl_offload::memory
