// The one seam to the operating system's memory. It has two implementations: linux_kernel (system
// calls) and simulated_kernel (nodes, capacities, policies, page maps and injected faults over
// ordinary memory). Everything above it runs the same on both.
//
// Ranges are whole pages of the kind they were mapped with. All functions may be called from any
// thread; `populate` binds only the calling thread, and only while it runs.
#ifndef CXL_OFFLOAD_OS_KERNEL_H_
#define CXL_OFFLOAD_OS_KERNEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "os/dax_device.h"
#include "os/node_set.h"

namespace cxl_offload::os {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;
inline constexpr size_t kGiganticPageBytes = size_t{1} << 30;

// What the pages of a mapping are.
enum class PageKind {
  kBase,             // base pages, never collapsed into huge ones (MADV_NOHUGEPAGE)
  kTransparentHuge,  // huge pages where the kernel finds some, else base pages (MADV_HUGEPAGE)
  kHuge2MiB,         // from the 2 MiB pool, or refused
  kHuge1GiB,         // from the 1 GiB pool, or refused
};

// How a range chooses nodes for pages that are not there yet, or that come back later (swap, copy
// on write). It has no effect on pages that are in place.
enum class PolicyMode { kDefault, kPreferredMany, kBind, kInterleave, kLocal };

struct Policy {
  PolicyMode mode = PolicyMode::kDefault;
  NodeSet nodes;
};

// What a node, or the process as a whole, can still give.
struct Headroom {
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;
  std::string limit;  // what sets it: "node 2", "cgroup memory.max", "memory of the machine"
  // A part of the free bytes, which the kernel gives out only when every other node is full.
  uint64_t withheld_bytes = 0;
};

// Page states of `query` and `move` below zero, as the kernel reports them (-errno).
inline constexpr int kPageAbsent = -2;   // -ENOENT: not faulted in
inline constexpr int kPageShared = -13;  // -EACCES: not moved; a forked child has it as well

class Kernel {
 public:
  virtual ~Kernel() = default;

  // Returns "linux" or "simulated"; every figure says which.
  virtual std::string name() const = 0;
  // Nodes with memory that this process may use (cpuset included).
  virtual NodeSet allowed_nodes() const = 0;
  // Bytes of a page of that kind: the unit in which ranges are given. A transparent huge mapping
  // is given in base pages.
  virtual size_t page_bytes(PageKind kind) const = 0;
  // Bytes of a transparent huge page: 2 MiB on x86, 512 MiB on arm64 with base pages of 64 KiB.
  virtual size_t transparent_huge_bytes() const = 0;
  // Room for pages of that kind on one node (the node's huge-page pool for explicit huge pages).
  virtual Headroom node_headroom(NodeId node, PageKind kind) const = 0;
  // Room for the whole process: the tightest of the machine's memory and its cgroups.
  virtual Headroom process_headroom() const = 0;
  // Other nodes in the order in which memory falls back from `node`, nearest first.
  virtual std::vector<NodeId> fallback_order(NodeId node) const = 0;
  // Bytes of the node in ZONE_MOVABLE, out of which a long-term pin moves pages to other nodes.
  virtual uint64_t movable_bytes(NodeId node) const = 0;
  // The node nearest to the calling thread: where first touch puts its pages.
  virtual NodeId local_node() const = 0;

  // Claims a Device-DAX device for its owner alone. Throws InvalidArgument for a device that is not
  // there or not in mode devdax, SystemError when the device is claimed already or may not be
  // opened.
  virtual std::unique_ptr<DaxDevice> open_dax(const std::string& name) = 0;

  // Reserves a private range with no pages in it yet; its address is a multiple of `alignment`.
  // Throws OutOfMemory or SystemError; on throw nothing is left.
  virtual std::byte* map(size_t bytes, size_t alignment, PageKind kind) = 0;
  // Returns a page-aligned part of a mapping, pages included.
  virtual void unmap(std::span<std::byte> range) noexcept = 0;

  virtual void set_policy(std::span<std::byte> range, const Policy& policy) = 0;
  // Faults in every page of the range, preferring `node`. As in the kernel, pages for which that
  // node is full go elsewhere without an error, so query them afterwards. Requires that no policy
  // was set on the range. Throws OutOfMemory when nothing could be given; pages already there stay.
  virtual void populate(std::span<std::byte> range, NodeId node) = 0;
  // Drops the pages of the range; the range stays reserved and reads as zero.
  virtual void discard(std::span<std::byte> range) = 0;

  // Writes into nodes[i] the node of the page at range.data() + i * page_bytes, or a state below
  // zero. nodes.size() == range.size() / page_bytes.
  virtual void query(std::span<const std::byte> range, size_t page_bytes,
                     std::span<int> nodes) const = 0;
  // Moves page i to targets[i]; afterwards states[i] is its node or -errno. Contents and addresses
  // stay. Does not throw for pages that could not move; throws SystemError when the call itself is
  // refused.
  virtual void move(std::span<std::byte> range, size_t page_bytes, std::span<const NodeId> targets,
                    std::span<int> states) = 0;
};

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_KERNEL_H_
