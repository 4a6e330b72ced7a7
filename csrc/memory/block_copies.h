// Blocks that lie on several nodes as a whole, so that every socket reads its own copy.
#ifndef CXL_OFFLOAD_MEMORY_BLOCK_COPIES_H_
#define CXL_OFFLOAD_MEMORY_BLOCK_COPIES_H_

#include <cstddef>
#include <memory>

#include "memory/session.h"

namespace cxl_offload::memory {

// Whether any block of this process has copies: one load, so that who has none pays nothing.
bool any_copies() noexcept;

// The live block that holds the address, where it is the first of several copies; else null.
std::shared_ptr<PlacedBlock> find_first_copy(const std::byte* address);

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_BLOCK_COPIES_H_
