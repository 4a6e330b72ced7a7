// Blocks with a whole copy on each of several nodes, so that every socket reads its own copy.
#ifndef CXL_OFFLOAD_MEMORY_BLOCK_COPIES_H_
#define CXL_OFFLOAD_MEMORY_BLOCK_COPIES_H_

#include <cstddef>
#include <memory>

#include "memory/session.h"

namespace cxl_offload::memory {

// Whether any block of this process has copies. It takes one load, so programs without copies pay
// almost nothing.
bool any_copies() noexcept;

// Returns the live block that holds the address if it is the first of several copies, else null.
std::shared_ptr<PlacedBlock> find_first_copy(const std::byte* address);

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_BLOCK_COPIES_H_
