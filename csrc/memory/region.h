// A region: one mapping whose pages keep one placement rule. Pools cut regions into blocks.
#ifndef CXL_OFFLOAD_MEMORY_REGION_H_
#define CXL_OFFLOAD_MEMORY_REGION_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "gpu/driver.h"
#include "memory/rule.h"
#include "memory/stripe.h"

namespace cxl_offload::memory {

// Bytes that are on another node than they were put on, by where from and where to; -1 is nowhere.
using StrayBytes = std::map<std::pair<os::NodeId, os::NodeId>, uint64_t>;

// What a move is asked for. Only pinned memory needs more than the rule: it waits for the work on
// `streams` (for all work of the GPU if none is named), and goes back to `origin` where the pages
// arrive and pinning drives them away.
struct MoveRequest {
  Rule rule;
  Rule origin = {};
  std::vector<gpu::StreamId> streams = {};
};

// How a move ended that did not throw. Whatever happened, the memory is valid and counted where it
// is.
struct Moved {
  bool arrived = true;                      // it follows the new rule
  std::optional<std::string> failure = {};  // of pinned memory: why it did not arrive, or is not
                                            // pinned any more
  std::vector<std::string> notes = {};      // what the user should know of the new places
};

class Region {
 public:
  virtual ~Region() = default;  // returns every page that release() has not returned

  virtual std::span<std::byte> range() const = 0;
  // The unit in which pieces may be released.
  virtual size_t page_bytes() const = 0;
  // The unit in which parts of a block move. It is larger than page_bytes() where the kernel may
  // have made huge pages.
  virtual size_t unit_bytes() const { return page_bytes(); }
  // Whether it is registered with a GPU driver as one, and so never returned in parts.
  virtual bool pinned() const = 0;
  // Whether it is registered now. A move that failed may have left it unregistered.
  virtual bool registered() const { return pinned(); }
  // Whether a block cut at [offset, offset + bytes) has exactly the shares of nodes that a fresh
  // region of `bytes` would have. Always true for rules that name a single node.
  virtual bool keeps_rule(size_t offset, size_t bytes) const = 0;
  // The first offset >= `offset` at which the rule's pattern starts anew (a multiple of the
  // stripe's cycle; of the page for single-node rules).
  virtual size_t next_cut(size_t offset) const = 0;
  // Returns whole pages early. Pinned regions refuse this, because they are registered as one.
  virtual void release(size_t offset, size_t bytes) = 0;
  // Which node each part of [offset, offset + bytes) was put on, offsets counted from `offset`;
  // empty where the region does not know.
  virtual std::vector<Run> runs(size_t, size_t) const { return {}; }
  // The Device-DAX device it is on; empty for memory of nodes.
  virtual std::string device() const { return ""; }
  // Why its pages never move, in the words of an error; empty where they can.
  virtual std::string why_fixed() const = 0;
  // Moves whole pages to a new rule, whose kind of pages is that of the region; all views stay
  // valid. A pinned region moves as a whole. Throws OutOfMemory when not every page arrived,
  // SystemError when a call was refused, and InvalidArgument where pages never move. Pages are then
  // put back as far as the kernel allows, and those that are not are counted where they are.
  // Several blocks of a region may move at the same time, but each block only once.
  virtual Moved move(size_t, size_t, const MoveRequest&) {
    throw InvalidArgument("move memory: " + why_fixed());
  }
  // Asks the pages where they are; what never moves has no strays.
  virtual StrayBytes strays() const { return {}; }
  // Counts every page where it is, from now on. For regions that nothing was released of.
  virtual void accept_strays() {}
  // What the user should know of this region: spilled nodes, pages that pinning moved.
  virtual std::vector<std::string> notes() const { return {}; }
};

// Where a pool's regions come from.
class RegionSource {
 public:
  virtual ~RegionSource() = default;
  // What blocks are cut in: pages, or the larger ones that they may turn out to be parts of.
  virtual size_t page_bytes() const = 0;
  // A region of at least `bytes`, rounded up to whole pages. Throws OutOfMemory, SystemError or
  // PlacementError; on throw nothing is left.
  virtual std::unique_ptr<Region> obtain(size_t bytes) = 0;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_REGION_H_
