// Copies with one thread and with stores that go past the caches. So the target is not read first,
// and the caches keep what others use.
#ifndef CXL_OFFLOAD_TRANSFER_STREAM_COPY_H_
#define CXL_OFFLOAD_TRANSFER_STREAM_COPY_H_

#include <cstddef>

#include "core/cpu_features.h"

namespace cxl_offload::transfer {

// Addresses and sizes may be any, but must not overlap. After the return, other threads that
// synchronise with this one see what was stored.
using StreamCopy = void (*)(std::byte* target, const std::byte* source, size_t bytes);

// This is memcpy where the architecture has no such stores. Those of Arm (STNP, and STNT1 of SVE)
// are hints that need not change anything, and its memcpy chooses its vectors by the processor.
StreamCopy stream_copy(Isa isa);

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_STREAM_COPY_H_
