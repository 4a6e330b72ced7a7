// One thread's copy with stores that go past the caches: the target is not read first, and the
// caches keep what others use.
#ifndef CXL_OFFLOAD_TRANSFER_STREAM_COPY_H_
#define CXL_OFFLOAD_TRANSFER_STREAM_COPY_H_

#include <cstddef>

#include "core/cpu_features.h"

namespace cxl_offload::transfer {

// Any addresses and sizes that do not overlap. What is stored is visible to other threads that are
// synchronised with on return.
using StreamCopy = void (*)(std::byte* target, const std::byte* source, size_t bytes);

// memcpy where the architecture has no such stores.
StreamCopy stream_copy(Isa isa);

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_STREAM_COPY_H_
