// A transfer cut into chunks, and the order in which they are handed to the GPU.
#ifndef CXL_OFFLOAD_TRANSFER_CHUNK_PLAN_H_
#define CXL_OFFLOAD_TRANSFER_CHUNK_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace cxl_offload::transfer {

// A lane stands for host bytes that reach the GPU over the same path: their node, or kNoLane where
// the node is not known.
using Lane = int;
inline constexpr Lane kNoLane = -1;

// Bytes that follow each other at both ends.
struct Piece {
  uint64_t device = 0;
  std::byte* host = nullptr;
  size_t bytes = 0;
  Lane lane = kNoLane;
  bool pinned = false;  // whether the GPU can read and write the host's end by itself
};

// Cuts pieces into chunks of at most `chunk_bytes`. Every lane gets its next chunk when it would
// have finished its last, so a lane of twice the rate gets twice the bytes. Inside a lane the order
// of the pieces is kept. Pinned pieces of a transfer with a single lane stay whole: there is
// nothing to overlap. Lanes without a rate have `rates` of 1.
std::vector<Piece> plan_chunks(const std::vector<Piece>& pieces, size_t chunk_bytes,
                               const std::map<Lane, double>& rates);

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_CHUNK_PLAN_H_
