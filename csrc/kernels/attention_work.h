// Cuts the work of decode attention by its input alone, so that any team gives the same result.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_WORK_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_WORK_H_

#include <algorithm>
#include <atomic>
#include <vector>

#include "kernels/attention.h"
#include "kernels/attention_pass.h"

namespace cxl_offload::kernels {

// Work is cut into about kUnits units. A unit has at least kFewestRows rows, so that the time to
// merge the results of units stays small beside the time to compute them.
inline constexpr int64_t kUnits = 512;
inline constexpr int64_t kFewestRows = 256;
// Where heads lie next to each other in a row of the cache, a unit takes as many of them as have
// this many bytes together. One head at a time would be one or two cache lines, far apart.
inline constexpr size_t kTileBytes = 4096;
// The same for 4-bit codes. It is less, because a unit of codes reads more rows together.
inline constexpr size_t kTileCodes = 1024;

// Some heads over some positions of one sequence.
struct Unit {
  int64_t batch = 0;
  int64_t head = 0;  // the first head of K and V
  int64_t heads = 0;
  int64_t begin = 0;
  int64_t end = 0;
  size_t place = 0;  // where its first query is in the partial results
  size_t part = 0;   // which of the Parts it belongs to
};

// Consecutive units of the same heads and sequence. Their results are joined.
struct Parts {
  int64_t batch = 0;
  int64_t head = 0;
  int64_t heads = 0;
  size_t place = 0;  // where the first query of the first unit is in the partial results
  size_t count = 0;
  std::atomic<size_t> left = 0;  // units that are still to be done
};

inline size_t row_bytes(const TensorView& view) {
  return static_cast<size_t>(view.shape[3]) * dtype_bytes(view.dtype);
}

inline int64_t tile_heads(const Attention& a) {
  const int64_t heads = a.k.shape[1];
  const bool side_by_side = a.k.strides[1] < a.k.strides[2] && a.v.strides[1] < a.v.strides[2];
  if (!side_by_side || a.k.strides[1] < 0 || a.v.strides[1] < 0) return 1;
  const size_t row = row_bytes(a.k);
  const size_t group = static_cast<size_t>(a.q.shape[1] / heads);
  const size_t most =
      std::min((a.k.dtype == Dtype::kUint8 ? kTileCodes : kTileBytes) / std::max(row, size_t{1}),
               kTileQueries / group);
  return std::clamp(static_cast<int64_t>(most), int64_t{1}, heads);
}

struct Work {
  explicit Work(const Attention& a)
      : tile(tile_heads(a)),
        parts(static_cast<size_t>(a.q.shape[0] * ((a.k.shape[1] + tile - 1) / tile))) {
    const int64_t batch = a.q.shape[0];
    const auto group = static_cast<size_t>(a.q.shape[1] / a.k.shape[1]);
    int64_t rows = 0;
    for (int64_t i = 0; i < batch; ++i) rows += end(a, i) - begin(a, i);
    const int64_t tiles = (a.k.shape[1] + tile - 1) / tile;
    const int64_t most = std::max(kFewestRows, (rows * tiles + kUnits - 1) / kUnits);
    size_t index = 0;
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t from = begin(a, i);
      const int64_t mine = end(a, i) - from;
      const int64_t count = (mine + most - 1) / most;
      for (int64_t head = 0; head < a.k.shape[1]; head += tile, ++index) {
        const int64_t heads = std::min(tile, a.k.shape[1] - head);
        Parts& joined = parts[index];
        joined.batch = i;
        joined.head = head;
        joined.heads = heads;
        joined.place = queries;
        joined.count = joined.left = static_cast<size_t>(count);
        for (int64_t part = 0; part < count; ++part) {
          units.push_back({i, head, heads, from + mine * part / count,
                           from + mine * (part + 1) / count, queries, index});
          queries += static_cast<size_t>(heads) * group;
        }
      }
    }
  }

  // The positions of a sequence that are attended to, unless the mask leaves some out.
  static int64_t end(const Attention& a, int64_t batch) {
    return a.lengths.empty() ? a.k.shape[2] : a.lengths[static_cast<size_t>(batch)];
  }
  static int64_t begin(const Attention& a, int64_t batch) {
    return a.window == 0 ? 0 : std::max(int64_t{0}, first_end(a, batch) - a.window);
  }
  // Where the positions that the first query sees end.
  static int64_t first_end(const Attention& a, int64_t batch) {
    return end(a, batch) - (a.causal ? a.queries - 1 : 0);
  }

  int64_t tile;        // the most heads of a unit
  size_t queries = 0;  // how many all units have together
  std::vector<Unit> units;
  std::vector<Parts> parts;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_WORK_H_
