// A transfer cut into chunks, and the order in which they are handed to the GPU.
#ifndef CXL_OFFLOAD_TRANSFER_CHUNK_PLAN_H_
#define CXL_OFFLOAD_TRANSFER_CHUNK_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace cxl_offload::transfer {

// Host bytes that are reached over the same path to the GPU have one lane: the node they are on, or
// kNoLane where nobody knows it.
using Lane = int;
inline constexpr Lane kNoLane = -1;

// Bytes that follow each other at both ends.
struct Piece {
  uint64_t device = 0;
  std::byte* host = nullptr;
  size_t bytes = 0;
  Lane lane = kNoLane;
  bool pinned = false;  // the GPU can read and write the host's end by itself
};

// Cuts pieces into at most `chunk_bytes` and orders them so that every lane gets its next chunk
// when it would have finished its last: lanes of twice the rate get twice the bytes. The order
// inside a lane is that of the pieces. Pinned pieces of a transfer with a single lane stay whole:
// there is nothing to overlap. Lanes without a rate have `rates` of 1.
std::vector<Piece> plan_chunks(const std::vector<Piece>& pieces, size_t chunk_bytes,
                               const std::map<Lane, double>& rates);

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_CHUNK_PLAN_H_
