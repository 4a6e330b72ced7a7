#include "memory/run_map.h"

#include <algorithm>
#include <iterator>

namespace cxl_offload::memory {

RunMap::RunMap(const std::vector<Run>& runs) { assign(0, runs); }

void RunMap::split_at(size_t offset) {
  auto after = pieces_.upper_bound(offset);
  if (after == pieces_.begin()) return;
  auto& [begin, piece] = *std::prev(after);
  if (begin == offset || begin + piece.bytes <= offset) return;
  pieces_.emplace(offset, Piece{begin + piece.bytes - offset, piece.node});
  piece.bytes = offset - begin;
}

NodeBytes RunMap::erase(size_t offset, size_t bytes) {
  split_at(offset);
  split_at(offset + bytes);
  NodeBytes erased;
  auto piece = pieces_.lower_bound(offset);
  while (piece != pieces_.end() && piece->first < offset + bytes) {
    erased[piece->second.node] += piece->second.bytes;
    piece = pieces_.erase(piece);
  }
  return erased;
}

void RunMap::assign(size_t base, const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    erase(base + run.offset, run.bytes);
    pieces_.emplace(base + run.offset, Piece{run.bytes, run.node});
  }
}

std::vector<Run> RunMap::slice(size_t offset, size_t bytes) const {
  std::vector<Run> runs;
  auto piece = pieces_.upper_bound(offset);
  if (piece != pieces_.begin()) --piece;
  for (; piece != pieces_.end() && piece->first < offset + bytes; ++piece) {
    const size_t begin = std::max(offset, piece->first);
    const size_t end = std::min(offset + bytes, piece->first + piece->second.bytes);
    if (begin < end) runs.push_back({begin - offset, end - begin, piece->second.node});
  }
  return runs;
}

NodeBytes RunMap::bytes_per_node() const {
  NodeBytes total;
  for (const auto& [offset, piece] : pieces_) total[piece.node] += piece.bytes;
  return total;
}

}  // namespace cxl_offload::memory
