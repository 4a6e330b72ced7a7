// Which node each part of a range is on: runs that can be reassigned and cut.
#ifndef CXL_OFFLOAD_MEMORY_RUN_MAP_H_
#define CXL_OFFLOAD_MEMORY_RUN_MAP_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "memory/stripe.h"
#include "os/node_set.h"

namespace cxl_offload::memory {

using NodeBytes = std::map<os::NodeId, uint64_t>;

class RunMap {
 public:
  RunMap() = default;
  explicit RunMap(const std::vector<Run>& runs);

  // Takes [offset, offset + bytes) out and says what was there.
  NodeBytes erase(size_t offset, size_t bytes);
  // Puts runs, whose offsets count from `base`, in place of what was there.
  void assign(size_t base, const std::vector<Run>& runs);
  // Runs inside [offset, offset + bytes), their offsets counted from `offset`.
  std::vector<Run> slice(size_t offset, size_t bytes) const;
  NodeBytes bytes_per_node() const;

 private:
  struct Piece {
    size_t bytes;
    os::NodeId node;
  };
  // Makes `offset` a boundary between pieces.
  void split_at(size_t offset);

  std::map<size_t, Piece> pieces_;  // by offset, not overlapping
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_RUN_MAP_H_
