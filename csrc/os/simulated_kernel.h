// A kernel with the nodes of a simulated machine over ordinary memory. Capacities, fallback, page
// maps, huge-page pools and faults are simulated; the bytes are real and hold what is written.
//
// Populating places pages in the page map only; real pages appear when somebody writes, so 400 GiB
// can be placed on a small machine as long as little of it is touched. A page that is touched
// without being populated is placed when it is next asked for, where first touch would have put it.
//
// A forked child is refused with InvalidArgument: the page maps are its parent's.
#ifndef CXL_OFFLOAD_OS_SIMULATED_KERNEL_H_
#define CXL_OFFLOAD_OS_SIMULATED_KERNEL_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/fork_guard.h"
#include "os/fault_plan.h"
#include "os/kernel.h"
#include "os/page_map.h"
#include "os/simulated_dax.h"
#include "os/simulated_machine.h"

namespace cxl_offload::os {

class SimulatedKernel final : public Kernel {
 public:
  explicit SimulatedKernel(const SimulatedMachine& machine);
  ~SimulatedKernel() override;
  SimulatedKernel(const SimulatedKernel&) = delete;
  SimulatedKernel& operator=(const SimulatedKernel&) = delete;

  std::string name() const override { return "simulated"; }
  NodeSet allowed_nodes() const override;
  size_t page_bytes(PageKind kind) const override;
  size_t transparent_huge_bytes() const override { return kHugePageBytes; }
  Headroom node_headroom(NodeId node, PageKind kind) const override;
  Headroom process_headroom() const override;
  std::vector<NodeId> fallback_order(NodeId node) const override;
  uint64_t movable_bytes(NodeId node) const override;
  NodeId local_node() const override { return initiator_; }
  std::unique_ptr<DaxDevice> open_dax(const std::string& name) override { return dax_.open(name); }
  std::byte* map(size_t bytes, size_t alignment, PageKind kind) override;
  void unmap(std::span<std::byte> range) noexcept override;
  void set_policy(std::span<std::byte> range, const Policy& policy) override;
  void populate(std::span<std::byte> range, NodeId node) override;
  void discard(std::span<std::byte> range) override;
  // Ranges that this kernel did not map have no pages on its nodes.
  void query(std::span<const std::byte> range, size_t page_bytes,
             std::span<int> nodes) const override;
  void move(std::span<std::byte> range, size_t page_bytes, std::span<const NodeId> targets,
            std::span<int> states) override;

  // A long-term pin, as a driver makes it (FOLL_LONGTERM): silently moves the pages of movable
  // nodes to the nearest node that is not movable, and keeps all pages in place until they are
  // unpinned. Throws OutOfMemory when no such node has room; pages that have moved stay there.
  void pin(std::span<const std::byte> range);
  void unpin(const std::byte* address) noexcept;

  // Tests add faults here, and read what happened.
  FaultPlan& faults() const { return faults_; }
  uint64_t used_bytes(NodeId node) const;
  size_t mapping_count() const;
  uint64_t dax_mapped_bytes(const std::string& name) const { return dax_.mapped_bytes(name); }
  // These act for other processes on the machine. They throw InvalidArgument for more than is free.
  void set_used_by_others(NodeId node, uint64_t bytes);
  void set_pool(NodeId node, size_t page_bytes, uint64_t pages);

 private:
  struct Mapping {
    size_t bytes;
    size_t page_bytes;
    bool reserved;     // its absent pages are set aside in the huge-page pools
    bool transparent;  // populating it finds huge pages, which then move as one
    PageMap pages;
  };
  using Mappings = std::map<const std::byte*, Mapping>;
  // Pages [first, first + count) of one mapping.
  struct Pages {
    Mappings::iterator at;
    size_t first;
    size_t count;
  };

  std::unique_lock<std::mutex> locked() const;
  // Callers of all of these hold the lock.
  Pages find(std::span<const std::byte> range) const;
  void place(const Pages& pages, const std::vector<NodeId>& order);
  void place_huge(const Pages& pages, NodeId node);
  void break_huge(const Pages& pages);
  Pages whole_page(Mappings::iterator at, size_t page) const;
  void forget(const Pages& pages);
  void take_in_touched(const Pages& pages) const;
  bool move_page(Mappings::iterator at, size_t page, NodeId target);
  bool is_pinned(const std::byte* address) const;
  std::vector<NodeId> order_from(NodeId node) const;
  void split(Mappings::iterator at, size_t first, size_t count);

  const ForkGuard guard_;
  const size_t base_page_bytes_;
  const NodeId initiator_;
  const bool reserves_huge_pages_;
  mutable FaultPlan faults_;
  SimulatedDaxBus dax_;
  mutable std::mutex mutex_;
  mutable NodeLedger ledger_;
  mutable Mappings mappings_;
  std::set<const std::byte*> huge_;          // transparent huge pages that are there, by address
  std::map<const std::byte*, size_t> pins_;  // ranges
};

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_SIMULATED_KERNEL_H_
