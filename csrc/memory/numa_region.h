// Regions on NUMA nodes: mapped, faulted in by their rule, and checked against the pages.
#ifndef CXL_OFFLOAD_MEMORY_NUMA_REGION_H_
#define CXL_OFFLOAD_MEMORY_NUMA_REGION_H_

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "memory/fault_in.h"
#include "memory/layout.h"
#include "memory/mapping.h"
#include "memory/node_budget.h"
#include "memory/region.h"
#include "memory/rule.h"
#include "memory/run_map.h"
#include "memory/stripe.h"
#include "os/kernel.h"

namespace cxl_offload::memory {

// What a session shares: the kernel, what it holds on the nodes, and how it behaves.
struct Placer {
  std::shared_ptr<os::Kernel> kernel;
  std::shared_ptr<NodeBudget> budget;
  Reserve reserve;
  size_t max_threads = 1;
};

// Accepts pages on other nodes where the rule lets them spill, with a note; else throws
// OutOfMemory, or SystemError where a forked child keeps them from moving.
void check_places(const Rule& rule, const std::vector<Run>& wanted, const Placed& placed,
                  std::vector<std::string>& notes);

// Refunds what is charged to the budget when it dies.
class Charge {
 public:
  Charge(std::shared_ptr<NodeBudget> budget, const NodeBytes& bytes);
  ~Charge();
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

  void add(const NodeBytes& bytes);
  void refund(const NodeBytes& bytes) noexcept;
  // See NodeBudget::exchange.
  void exchange(const NodeBytes& out, const NodeBytes& in);

 private:
  std::shared_ptr<NodeBudget> budget_;
  NodeBytes held_;
};

class NumaRegion final : public Region {
 public:
  // Maps and faults in `bytes`, rounded up to whole pages. Throws OutOfMemory (naming the node),
  // SystemError or InvalidArgument; on throw nothing is left.
  NumaRegion(const Placer& placer, const Rule& rule, size_t bytes);

  std::span<std::byte> range() const override { return mapping_.range(); }
  size_t page_bytes() const override { return page_bytes_; }
  size_t unit_bytes() const override { return unit_bytes_; }
  bool pinned() const override { return false; }
  bool keeps_rule(size_t offset, size_t bytes) const override;
  size_t next_cut(size_t offset) const override;
  void release(size_t offset, size_t bytes) override;
  std::vector<Run> runs(size_t offset, size_t bytes) const override;
  std::string why_fixed() const override { return ""; }
  Moved move(size_t offset, size_t bytes, const MoveRequest& request) override;
  StrayBytes strays() const override;
  void accept_strays() override;
  std::vector<std::string> notes() const override { return notes_; }

 private:
  NumaRegion(const Placer& placer, const Rule& rule, Layout layout, size_t bytes);
  Placed place(std::span<std::byte> pages, const std::vector<Run>& before,
               const std::vector<Run>& wanted);
  std::vector<Run> put_back(std::span<std::byte> pages, const std::vector<Run>& before) const;
  // Charges what `needed` has beyond `charged`, and adds it there; returns it. Throws OutOfMemory.
  NodeBytes charge_more(const NodeBytes& needed, NodeBytes& charged);
  void account(size_t offset, size_t bytes, const NodeBytes& extra, const std::vector<Run>& actual);

  Placer placer_;
  Rule rule_;
  std::optional<Stripe> stripe_;
  size_t page_bytes_;  // in which pages are counted and asked
  size_t unit_bytes_;  // in which blocks are cut
  std::vector<std::string> notes_;
  bool follows_rule_ = true;
  std::optional<Charge> charge_;
  Mapping mapping_;
  mutable std::mutex mutex_;  // guards runs_ and charge_
  RunMap runs_;
};

class NumaSource final : public RegionSource {
 public:
  NumaSource(Placer placer, Rule rule);
  size_t page_bytes() const override;
  std::unique_ptr<Region> obtain(size_t bytes) override;

 private:
  Placer placer_;
  Rule rule_;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_NUMA_REGION_H_
