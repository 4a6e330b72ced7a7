// A session: the pools over one kernel, with one pool for every rule in use, and the owner of every
// address.
#ifndef CXL_OFFLOAD_MEMORY_SESSION_H_
#define CXL_OFFLOAD_MEMORY_SESSION_H_

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "core/fork_guard.h"
#include "gpu/driver.h"
#include "memory/allocation.h"
#include "memory/dax_region.h"
#include "memory/numa_region.h"
#include "memory/outside_pages.h"
#include "memory/pinned.h"
#include "memory/pool.h"
#include "memory/rule.h"
#include "memory/run_map.h"
#include "memory/statistics.h"

namespace cxl_offload::memory {

class Session;

// Pages that are on another node than the one they were put on.
struct Stray {
  std::span<std::byte> pages;
  os::NodeId placed_on = 0;
  os::NodeId found_on = 0;
  bool is_back = false;
};

struct AskedPages {
  std::vector<std::span<std::byte>> lost;
  std::vector<Stray> strays;
};

// An allocation with the rule it was made by. Dropping it is safe wherever dropping an Allocation
// is. A forked child may read its bytes and drop it; what takes a lock throws InvalidArgument
// there.
class PlacedBlock : public std::enable_shared_from_this<PlacedBlock> {
 public:
  PlacedBlock(std::shared_ptr<Session> session, std::shared_ptr<Allocation> memory, Rule rule,
              std::vector<std::string> notes);
  ~PlacedBlock();
  PlacedBlock(const PlacedBlock&) = delete;
  PlacedBlock& operator=(const PlacedBlock&) = delete;

  Allocation& memory() const { return *memory_; }
  const Session& session() const { return *session_; }
  std::span<std::byte> range() const { return {memory_->address(), memory_->bytes()}; }
  size_t page_bytes() const { return memory_->region()->page_bytes(); }
  // The unit in which parts of it move: whole huge pages, where the kernel may have made some.
  size_t unit_bytes() const { return memory_->region()->unit_bytes(); }
  // The rule in words. After a move it is the new rule.
  std::string requested() const;
  std::vector<std::string> notes() const;
  // Which node every part of [offset, offset + bytes) was put on; empty if unknown. Throws
  // InvalidArgument for a part that is outside of the block.
  std::vector<Run> runs(size_t offset, size_t bytes) const;
  // See Allocation::record_stream.
  void record_stream(gpu::StreamId stream);
  // All copies of a block of kReplicate, itself among them, in the order of their nodes; empty for
  // other blocks. The first copy owns the others. Once it is dropped, they have no copies.
  std::vector<std::shared_ptr<PlacedBlock>> copies() const;
  bool is_first_copy() const { return !others_.empty(); }
  // For the first copy: `at` is one of its bytes; returns where that byte lies in the copy nearest
  // to a node. For a block without copies returns `at` itself.
  const std::byte* near_copy(const std::byte* at, os::NodeId node) const;
  // Moves the pages to a new rule; pinned ones once the work on their streams is done. Throws
  // InvalidArgument for blocks that share their pages or their registration, what the move throws
  // with everything back in place, and PlacementError that says where pinned memory ended.
  void move(Rule rule);
  // Moves whole pages of a part alone; the last part may end with the block. The rule stays that of
  // the whole block, and a note says that parts are elsewhere. Throws what the move throws with the
  // part back in place, and InvalidArgument also for pinned memory, which is registered as a whole.
  void move_part(size_t offset, size_t bytes, Rule rule);
  // Asks all its pages whether they are still there and on the node where they were put. The kernel
  // may have taken them out of use or moved them. Lost pages are replaced (os/memory_failure.h).
  // With `bring_back`, pages on other nodes come back, unless they are pinned. Throws SystemError.
  AskedPages ask_pages(bool bring_back);

 private:
  Rule rule() const;
  Region& movable(const std::string& what, const Rule& asked) const;
  friend class Session;
  void own(std::vector<std::shared_ptr<PlacedBlock>> others);
  void count_out() noexcept;
  void find_nearest(const std::vector<Share>& copies);

  std::shared_ptr<Session> session_;
  std::shared_ptr<Allocation> memory_;
  std::mutex moving_;         // held while the block moves; always taken before mutex_
  mutable std::mutex mutex_;  // guards what move changes
  Rule rule_;
  std::vector<std::string> notes_;
  // These are set before anybody else knows the block, and never again.
  std::vector<std::shared_ptr<PlacedBlock>> others_;  // for the first copy: the other ones
  std::weak_ptr<PlacedBlock> first_;                  // for the others: the first one
  bool is_copy_ = false;                              // it is the first copy or another one
  std::map<os::NodeId, size_t> nearest_;              // node to copy: 0 is the first
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  // `device_capacities` says how much may be taken of Device-DAX devices. For a device that it does
  // not name, that is all.
  explicit Session(Placer placer, std::map<std::string, uint64_t> device_capacities = {});

  // With a driver the block is pinned, and has no copies. A stripe of less than one cycle goes to
  // the node of the largest weight, and a note says so. Throws what Pool::allocate throws, and
  // InvalidArgument; OutOfMemory only after what all pools of the session cache was given back. A
  // rule that may spill spills, and does not empty other pools; call trim() first where that
  // matters.
  std::shared_ptr<PlacedBlock> allocate(size_t bytes, Rule rule,
                                        const std::shared_ptr<gpu::GpuDriver>& driver);
  // Places pages that others mapped by a rule; see place_outside.
  std::vector<std::string> place(const Parts& parts, Rule rule) const;
  // The live block that holds the address, or null.
  std::shared_ptr<PlacedBlock> find(const std::byte* address) const;
  // All live blocks, by address.
  std::vector<std::shared_ptr<PlacedBlock>> blocks() const;
  // Bytes on every node, asked from the pages; works for any mapped range. Memory of a device is on
  // no node.
  NodeBytes bytes_per_node(std::span<const std::byte> range) const;
  const os::Kernel& kernel() const { return *placer_.kernel; }
  // All four hold nothing in a forked child.
  std::map<std::string, NodeUse> device_use() const;
  std::map<os::NodeId, NodeUse> node_use() const;
  Statistics statistics() const;
  // Returns what the pools cache, and forgets the pools that nothing is allocated from.
  Trimmed trim();

 private:
  friend class PlacedBlock;
  using PoolKey = std::tuple<RuleKind, std::vector<std::pair<os::NodeId, uint32_t>>, size_t, bool,
                             os::PageKind, std::string, const gpu::GpuDriver*>;

  std::shared_ptr<PlacedBlock> allocate_one(size_t bytes, Rule rule,
                                            const std::shared_ptr<gpu::GpuDriver>& driver);
  // Makes find() return the block for its addresses.
  void make_known(const std::shared_ptr<PlacedBlock>& block);
  std::shared_ptr<PlacedBlock> allocate_copies(size_t bytes, const Rule& rule);
  std::shared_ptr<Pool> pool_for(const Rule& rule, const std::shared_ptr<gpu::GpuDriver>& driver);
  std::shared_ptr<RegionSource> source_for(const Rule& rule);
  std::shared_ptr<Pool> make_pool(const Rule& rule, const std::shared_ptr<gpu::GpuDriver>& driver);
  std::vector<std::shared_ptr<Pool>> take_unused_pools();
  template <typename Attempt>
  auto with_all_memory(const Attempt& attempt);
  void forget(const std::byte* address) noexcept;
  static void remember(std::weak_ptr<Session> session);
  std::vector<std::shared_ptr<Pool>> pools() const;

  const Placer placer_;
  const std::map<std::string, uint64_t> device_capacities_;
  const ForkGuard guard_;  // in a forked child the locks below may be held for ever
  mutable std::mutex pools_mutex_;
  std::map<PoolKey, std::shared_ptr<Pool>> pools_;
  std::map<std::string, std::shared_ptr<DaxStore>> stores_;  // devices that were used
  size_t sweep_at_;          // how many pools there may be before the unused ones go
  Statistics past_;          // of pools that are gone
  std::mutex last_attempt_;  // held by the thread that tries once more after running out of memory
  mutable std::mutex blocks_mutex_;
  std::map<const std::byte*, std::weak_ptr<PlacedBlock>> blocks_;
  std::once_flag known_;  // set once find_block knows this session
};

// The live block of any session of this process that holds the address, or null.
std::shared_ptr<PlacedBlock> find_block(const std::byte* address);

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_SESSION_H_
