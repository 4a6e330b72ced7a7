#include "os/simulated_machine.h"

#include <algorithm>

#include "core/error.h"

namespace cxl_offload::os {
namespace {

constexpr int kLocalDistance = 10;
constexpr int kRemoteDistance = 20;

[[noreturn]] void throw_bad(const std::string& what) {
  throw InvalidArgument("simulated machine: " + what);
}

int distance(const SimulatedMachine& machine, size_t from, size_t to) {
  if (machine.distances.empty()) return from == to ? kLocalDistance : kRemoteDistance;
  return machine.distances[from][to];
}

void check_distances(const SimulatedMachine& machine) {
  const size_t count = machine.nodes.size();
  if (machine.distances.empty()) return;
  bool is_square = machine.distances.size() == count;
  for (const auto& row : machine.distances) is_square = is_square && row.size() == count;
  if (!is_square) {
    throw_bad("distances must be a table of " + std::to_string(count) + " x " +
              std::to_string(count) + ", one row a node");
  }
}

}  // namespace

NodeLedger::NodeLedger(const SimulatedMachine& machine, size_t base_page_bytes)
    : base_page_bytes_(base_page_bytes), process_limit_(machine.process_limit_bytes) {
  check_distances(machine);
  for (const SimulatedNode& given : machine.nodes) {
    NodeSet{given.id};  // refuses ids out of range
    Node node{given.total_bytes, given.movable, 0, 0, {}, {}};
    if (!nodes_.emplace(given.id, std::move(node)).second) {
      throw_bad("node " + std::to_string(given.id) + " appears twice");
    }
    for (const SimulatedPool& pool : given.pools) set_pool(given.id, pool.page_bytes, pool.pages);
    set_used_by_others(given.id, given.used_by_others_bytes);
  }
  check_node(machine.initiator);
  for (const SimulatedNode& given : machine.nodes) {
    const bool is_allowed =
        machine.allowed_nodes.empty() ||
        std::ranges::find(machine.allowed_nodes, given.id) != machine.allowed_nodes.end();
    if (is_allowed && given.total_bytes > 0) allowed_.insert(given.id);
  }
  for (NodeId id : machine.allowed_nodes) check_node(id);
  if (allowed_.empty()) throw_bad("no allowed node has memory");
  for (size_t from = 0; from < machine.nodes.size(); ++from) {
    std::vector<std::pair<int, NodeId>> others;
    for (size_t to = 0; to < machine.nodes.size(); ++to) {
      const NodeId id = machine.nodes[to].id;
      if (to != from && allowed_.contains(id)) {
        others.emplace_back(distance(machine, from, to), id);
      }
    }
    std::ranges::sort(others);
    for (const auto& [unused, id] : others) node(machine.nodes[from].id).fallback.push_back(id);
  }
}

const NodeLedger::Node& NodeLedger::node(NodeId id) const {
  const auto found = nodes_.find(id);
  if (found != nodes_.end()) return found->second;
  NodeSet known;
  for (const auto& [node_id, unused] : nodes_) known.insert(node_id);
  throw InvalidArgument("node " + std::to_string(id) + " is not one of the nodes " +
                        known.to_string() + " of the simulated machine");
}

void NodeLedger::check_node(NodeId id) const { node(id); }

std::vector<NodeId> NodeLedger::fallback_order(NodeId id) const { return node(id).fallback; }

uint64_t NodeLedger::room_bytes(const Node& node) const {
  uint64_t held = node.others_bytes + node.used_pages * base_page_bytes_;
  for (const auto& [page_bytes, pool] : node.pools) held += page_bytes * pool.pages;
  return node.total_bytes - held;
}

uint64_t NodeLedger::used_base_bytes() const {
  uint64_t pages = 0;
  for (const auto& [id, node] : nodes_) pages += node.used_pages;
  return pages * base_page_bytes_;
}

uint64_t NodeLedger::take(NodeId id, size_t page_bytes, uint64_t pages) {
  if (!allowed_.contains(id)) return 0;
  Node& from = node(id);
  if (page_bytes != base_page_bytes_) {
    const auto pool = from.pools.find(page_bytes);
    if (pool == from.pools.end()) return 0;
    const uint64_t taken = std::min(pages, pool->second.pages - pool->second.used);
    pool->second.used += taken;
    return taken;
  }
  uint64_t room = room_bytes(from);
  if (process_limit_) {
    room = std::min(room, *process_limit_ - std::min(*process_limit_, used_base_bytes()));
  }
  const uint64_t taken = std::min(pages, room / page_bytes);
  from.used_pages += taken;
  return taken;
}

void NodeLedger::give_back(NodeId id, size_t page_bytes, uint64_t pages) {
  Node& to = node(id);
  if (page_bytes == base_page_bytes_) {
    to.used_pages -= pages;
  } else {
    to.pools.at(page_bytes).used -= pages;
  }
}

bool NodeLedger::reserve(size_t page_bytes, uint64_t pages) {
  uint64_t free = 0;
  for (NodeId id : allowed_.nodes()) free += free_bytes(id, page_bytes) / page_bytes;
  uint64_t& reserved = reserved_[page_bytes];
  if (free < reserved + pages) return false;
  reserved += pages;
  return true;
}

void NodeLedger::cancel_reservation(size_t page_bytes, uint64_t pages) {
  reserved_[page_bytes] -= pages;
}

uint64_t NodeLedger::total_bytes(NodeId id, size_t page_bytes) const {
  const Node& at = node(id);
  if (page_bytes == base_page_bytes_) return at.total_bytes;
  const auto pool = at.pools.find(page_bytes);
  return pool == at.pools.end() ? 0 : pool->second.pages * page_bytes;
}

uint64_t NodeLedger::free_bytes(NodeId id, size_t page_bytes) const {
  const Node& at = node(id);
  if (page_bytes == base_page_bytes_) return room_bytes(at);
  const auto pool = at.pools.find(page_bytes);
  return pool == at.pools.end() ? 0 : (pool->second.pages - pool->second.used) * page_bytes;
}

uint64_t NodeLedger::used_bytes(NodeId id) const {
  const Node& at = node(id);
  uint64_t used = at.used_pages * base_page_bytes_;
  for (const auto& [page_bytes, pool] : at.pools) used += pool.used * page_bytes;
  return used;
}

Headroom NodeLedger::process_headroom() const {
  Headroom machine{0, 0, "memory of the machine"};
  for (NodeId id : allowed_.nodes()) {
    machine.total_bytes += node(id).total_bytes;
    machine.free_bytes += room_bytes(node(id));
  }
  if (!process_limit_) return machine;
  const uint64_t left = *process_limit_ - std::min(*process_limit_, used_base_bytes());
  if (left >= machine.free_bytes) return machine;
  return {*process_limit_, left, "cgroup memory.max"};
}

void NodeLedger::set_used_by_others(NodeId id, uint64_t bytes) {
  Node& at = node(id);
  const uint64_t most = room_bytes(at) + at.others_bytes;
  if (bytes > most) {
    throw_bad("others cannot use " + format_bytes(bytes) + " of node " + std::to_string(id) +
              ": it has " + format_bytes(most) + " for them");
  }
  at.others_bytes = bytes;
}

void NodeLedger::set_pool(NodeId id, size_t page_bytes, uint64_t pages) {
  if (page_bytes != kHugePageBytes && page_bytes != kGiganticPageBytes) {
    throw_bad("a pool of " + format_bytes(page_bytes) + " pages; huge pages are 2 MiB or 1 GiB");
  }
  Node& at = node(id);
  Pool& pool = at.pools[page_bytes];
  const uint64_t most = (room_bytes(at) + pool.pages * page_bytes) / page_bytes;
  if (pages > most || pages < pool.used) {
    throw_bad("a pool of " + std::to_string(pages) + " pages of " + format_bytes(page_bytes) +
              " on node " + std::to_string(id) + ": " + std::to_string(pool.used) +
              " are in use and " + std::to_string(most) + " fit");
  }
  pool.pages = pages;
}

}  // namespace cxl_offload::os
