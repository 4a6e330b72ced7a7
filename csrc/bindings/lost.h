// What every binding that reads or writes memory of others asks: is all of it still there?
#ifndef CXL_OFFLOAD_BINDINGS_LOST_H_
#define CXL_OFFLOAD_BINDINGS_LOST_H_

#include <cstddef>
#include <span>
#include <string>

#include "core/error.h"
#include "core/tensor_view.h"
#include "os/lost_ranges.h"

namespace cxl_offload::bindings {

// Gathers what of the memory of a call is lost, where any is.
class LostParts {
 public:
  void add(std::span<const std::byte> range);
  // All from the first to the last element.
  void add(const TensorView& view);
  // Of a cache (sequence or block, head, position, ...) the first `count` positions of one sequence
  // or block: other positions may lie between those of two heads.
  void add_positions(const TensorView& cache, int64_t index, int64_t count);
  // Throws MemoryLost where anything was found.
  void refuse() const;

 private:
  MemoryLost::Ranges ranges_;
};

// Bytes that a call writes from end to end, whatever they were.
void settle(const TensorView& view);

// Throws MemoryLost where memory of a call is lost, which `gather` adds to LostParts. One load
// where nothing is.
template <typename Gather>
void check_memory(const Gather& gather) {
  if (!os::any_loss()) return;
  LostParts parts;
  gather(parts);
  parts.refuse();
}

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_LOST_H_
