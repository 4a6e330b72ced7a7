// Every binding that reads or writes memory of others asks here whether all of it is still there.
#ifndef CXL_OFFLOAD_BINDINGS_LOST_H_
#define CXL_OFFLOAD_BINDINGS_LOST_H_

#include <cstddef>
#include <span>
#include <string>

#include "core/error.h"
#include "core/tensor_view.h"
#include "os/lost_ranges.h"

namespace cxl_offload::bindings {

// Gathers the lost parts of the memory that a call uses.
class LostParts {
 public:
  void add(std::span<const std::byte> range);
  // Adds everything from the first to the last element.
  void add(const TensorView& view);
  // Adds the first `count` positions of one sequence or block of a cache (sequence or block, head,
  // position,
  // ...). Other positions may lie between those of two heads.
  void add_positions(const TensorView& cache, int64_t index, int64_t count);
  // Throws MemoryLost where anything was found.
  void refuse() const;

 private:
  MemoryLost::Ranges ranges_;
};

// The bytes that a call writes from end to end, whatever they were before.
void settle(const TensorView& view);

// Throws MemoryLost if memory of a call is lost. `gather` adds that memory to LostParts. If no
// memory is lost, this takes one load.
template <typename Gather>
void check_memory(const Gather& gather) {
  if (!os::any_loss()) return;
  LostParts parts;
  gather(parts);
  parts.refuse();
}

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_LOST_H_
