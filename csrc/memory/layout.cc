#include "memory/layout.h"

#include <algorithm>
#include <map>

#include "core/error.h"

namespace cxl_offload::memory {
namespace {

using os::Kernel;
using os::NodeId;

struct Room {
  uint64_t bytes = 0;
  std::string text;  // "node 2 has 31.5 GiB free"
};

// The room that is left on the nodes while one layout is made.
class Rooms {
 public:
  Rooms(const Kernel& kernel, const NodeBudget& budget, const Reserve& reserve, os::PageKind kind,
        const NodeBytes& held)
      : kernel_(kernel), budget_(budget), reserve_(reserve), kind_(kind), held_(held) {}

  Room& of(NodeId node) {
    const auto [at, is_new] = rooms_.try_emplace(node);
    if (is_new) at->second = measure(node);
    return at->second;
  }

  uint64_t take(NodeId node, uint64_t wanted, size_t page) {
    Room& room = of(node);
    const uint64_t taken = std::min(wanted, room.bytes / page * page);
    room.bytes -= taken;
    return taken;
  }

 private:
  Room measure(NodeId node) const {
    const os::Headroom headroom = kernel_.node_headroom(node, kind_);
    // Huge-page pools are set aside already; only ordinary memory needs a reserve.
    const bool is_pool = kernel_.page_bytes(kind_) >= os::kHugePageBytes;
    // Below its watermarks a node sends pages to another one before it is full.
    const uint64_t kept = is_pool ? 0 : reserve_.of(headroom.total_bytes) + headroom.withheld_bytes;
    Room room{headroom.free_bytes - std::min(kept, headroom.free_bytes), ""};
    room.text = headroom.limit + " has " + format_bytes(headroom.free_bytes) + " free";
    if (kept > 0) room.text += " (" + format_bytes(kept) + " of it kept in reserve)";
    if (const auto left = budget_.room(node); left && *left < room.bytes) {
      room.bytes = *left;
      room.text = "node " + std::to_string(node) + " has " + format_bytes(*left) +
                  " of its set capacity left";
    }
    if (const auto own = held_.find(node); own != held_.end()) room.bytes += own->second;
    return room;
  }

  const Kernel& kernel_;
  const NodeBudget& budget_;
  const Reserve& reserve_;
  os::PageKind kind_;
  const NodeBytes& held_;
  std::map<NodeId, Room> rooms_;
};

void append(std::vector<Run>& runs, size_t bytes, NodeId node) {
  if (bytes == 0) return;
  const size_t offset = runs.empty() ? 0 : runs.back().offset + runs.back().bytes;
  runs.push_back({offset, bytes, node});
}

[[noreturn]] void throw_full(const Rule& rule, size_t bytes, const std::string& nodes,
                             const char* remedy) {
  throw OutOfMemory("place " + format_bytes(bytes) + " (" + rule.describe() + "): " + nodes + "; " +
                    remedy);
}

void check_process(const Rule& rule, size_t bytes, const Kernel& kernel, const Reserve& reserve) {
  if (kernel.page_bytes(rule.pages) >= os::kHugePageBytes) return;
  const os::Headroom headroom = kernel.process_headroom();
  const uint64_t kept = reserve.of(headroom.total_bytes);
  if (bytes <= headroom.free_bytes - std::min(kept, headroom.free_bytes)) return;  // also 0
  throw_full(rule, bytes,
             headroom.limit + " has " + format_bytes(headroom.free_bytes) + " left (" +
                 format_bytes(kept) + " of it kept in reserve)",
             "free memory, or raise that limit");
}

// Fills `nodes` in order; the bytes that found no room are returned.
size_t fill_in_order(const std::vector<NodeId>& nodes, size_t bytes, size_t page, Rooms& rooms,
                     std::vector<Run>& runs) {
  for (NodeId node : nodes) {
    const size_t taken = rooms.take(node, bytes, page);
    append(runs, taken, node);
    bytes -= taken;
    if (bytes == 0) break;
  }
  return bytes;
}

Layout lay_out_in_order(const Rule& rule, size_t bytes, const Kernel& kernel, Rooms& rooms) {
  std::vector<NodeId> nodes;
  for (const Share& share : rule.shares) nodes.push_back(share.node);
  const size_t listed = nodes.size();
  if (rule.kind == RuleKind::kPreferred) {
    for (NodeId node : kernel.fallback_order(nodes.front())) {
      if (std::ranges::find(nodes, node) == nodes.end()) nodes.push_back(node);
    }
  }
  std::string rooms_text;
  for (NodeId node : nodes) rooms_text += (rooms_text.empty() ? "" : ", ") + rooms.of(node).text;
  Layout layout;
  if (fill_in_order(nodes, bytes, unit_bytes(kernel, rule.pages), rooms, layout.runs) > 0) {
    throw_full(rule, bytes, rooms_text, "ask for less, or add a spill node");
  }
  for (const Run& run : layout.runs) {
    const auto at = std::ranges::find(nodes, run.node) - nodes.begin();
    if (static_cast<size_t>(at) >= listed) {
      layout.notes.push_back(format_bytes(run.bytes) + " spilled to node " +
                             std::to_string(run.node) + ", which was not listed: " + rooms_text);
    }
  }
  return layout;
}

// Puts the granules of a stripe that their node cannot take on the nearest node with room.
Layout spill_stripe(const Rule& rule, const std::vector<Run>& wanted, const Kernel& kernel,
                    Rooms& rooms) {
  const size_t page = unit_bytes(kernel, rule.pages);
  Layout layout;
  std::map<NodeId, uint64_t> spilled;
  size_t total = 0;
  for (const Run& run : wanted) {
    total += run.bytes;
    std::vector<NodeId> nodes{run.node};
    for (NodeId node : kernel.fallback_order(run.node)) nodes.push_back(node);
    const size_t before = layout.runs.size();
    const size_t left = fill_in_order(nodes, run.bytes, page, rooms, layout.runs);
    if (left > 0) {
      throw_full(rule, total, "no node has room for the last " + format_bytes(left),
                 "ask for less");
    }
    for (size_t i = before; i < layout.runs.size(); ++i) {
      if (layout.runs[i].node != run.node) spilled[layout.runs[i].node] += layout.runs[i].bytes;
    }
  }
  for (const auto& [node, amount] : spilled) {
    layout.notes.push_back(format_bytes(amount) + " of the interleave went to node " +
                           std::to_string(node) + " because a node of the rule was full");
  }
  return layout;
}

// Checks the room before the runs are listed, because there may be very many runs.
Layout lay_out_stripe(const Rule& rule, size_t bytes, const Kernel& kernel, Rooms& rooms) {
  const Stripe stripe(rule.shares, rule.granule_bytes);
  const auto need = stripe.bytes_of_shares(bytes);
  std::string full;
  for (size_t i = 0; i < need.size(); ++i) {
    const NodeId node = rule.shares[i].node;
    const Room& room = rooms.of(node);
    if (need[i] <= room.bytes) continue;
    full += (full.empty() ? "" : ", ") + std::string("node ") + std::to_string(node) + " needs " +
            format_bytes(need[i]) + " and " + room.text;
  }
  if (full.empty()) return {stripe.runs(bytes), {}};
  if (rule.strict) throw_full(rule, bytes, full, "lower its weight or add a node");
  uint64_t left = bytes;
  for (const NodeId node : kernel.allowed_nodes().nodes()) {
    left -= std::min(left, rooms.of(node).bytes);
  }
  if (left > 0) throw_full(rule, bytes, full + "; no other node has room", "ask for less");
  return spill_stripe(rule, stripe.runs(bytes), kernel, rooms);
}

}  // namespace

uint64_t Reserve::of(uint64_t total_bytes) const {
  const auto share = static_cast<uint64_t>(static_cast<double>(total_bytes) * fraction);
  return std::clamp(share, min_bytes, max_bytes);
}

Layout lay_out(const Rule& rule, size_t bytes, const Kernel& kernel, const NodeBudget& budget,
               const Reserve& reserve, const NodeBytes& held) {
  uint64_t held_bytes = 0;
  for (const auto& [node, amount] : held) held_bytes += amount;
  check_process(rule, bytes - std::min<uint64_t>(bytes, held_bytes), kernel, reserve);
  Rooms rooms(kernel, budget, reserve, rule.pages, held);
  switch (rule.kind) {
    case RuleKind::kFirstTouch:
    case RuleKind::kDevice:
    case RuleKind::kReplicate:  // every copy is laid out by a rule of its own
      return {};
    case RuleKind::kBind:
    case RuleKind::kPreferred:
      return lay_out_in_order(rule, bytes, kernel, rooms);
    case RuleKind::kStripe:
      return lay_out_stripe(rule, bytes, kernel, rooms);
  }
  return {};
}

}  // namespace cxl_offload::memory
