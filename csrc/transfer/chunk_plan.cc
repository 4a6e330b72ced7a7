#include "transfer/chunk_plan.h"

#include <algorithm>
#include <deque>

namespace cxl_offload::transfer {
namespace {

struct LaneQueue {
  std::deque<Piece> chunks;
  double rate = 1;
  double given = 0;  // bytes handed out
  // When the lane would have finished its next chunk, in units of its rate.
  double next_end() const { return (given + static_cast<double>(chunks.front().bytes)) / rate; }
};

void cut(const Piece& piece, size_t chunk_bytes, std::deque<Piece>& chunks) {
  for (size_t at = 0; at < piece.bytes; at += chunk_bytes) {
    Piece chunk = piece;
    chunk.device += at;
    chunk.host += at;
    chunk.bytes = std::min(chunk_bytes, piece.bytes - at);
    chunks.push_back(chunk);
  }
}

}  // namespace

std::vector<Piece> plan_chunks(const std::vector<Piece>& pieces, size_t chunk_bytes,
                               const std::map<Lane, double>& rates) {
  const bool one_lane = std::ranges::all_of(
      pieces, [&](const Piece& piece) { return piece.lane == pieces.front().lane; });
  std::map<Lane, LaneQueue> lanes;
  for (const Piece& piece : pieces) {
    LaneQueue& lane = lanes[piece.lane];
    if (const auto rate = rates.find(piece.lane); rate != rates.end()) lane.rate = rate->second;
    cut(piece, one_lane && piece.pinned ? std::max<size_t>(piece.bytes, 1) : chunk_bytes,
        lane.chunks);
  }
  std::vector<Piece> order;
  for (;;) {
    LaneQueue* first = nullptr;
    for (auto& [id, lane] : lanes) {
      if (lane.chunks.empty()) continue;
      if (first == nullptr || lane.next_end() < first->next_end()) first = &lane;
    }
    if (first == nullptr) return order;
    order.push_back(first->chunks.front());
    first->given += static_cast<double>(first->chunks.front().bytes);
    first->chunks.pop_front();
  }
}

}  // namespace cxl_offload::transfer
