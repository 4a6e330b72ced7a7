#include "transfer/host_copy.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/sizes.h"
#include "transfer/strided.h"

namespace cxl_offload::transfer {
namespace {

// How many pieces each thread gets. With several, a thread that is held up does not hold up the
// others.
constexpr size_t kPiecesEach = 4;
constexpr size_t kLeastPiece = size_t{64} << 10;
constexpr size_t kPieceUnit = kBasePageBytes;

// In smaller blocks, stores that go past the caches cannot fill a line before the block ends.
constexpr size_t kLeastStreamed = 512;
// Among scattered blocks, smaller ones are quicker through the caches (bench_copy, AMD EPYC: blocks
// of 4 KiB 15 % quicker, of 16 KiB alike, of 64 KiB 17 % slower).
constexpr size_t kLeastStreamedBlock = size_t{32} << 10;

size_t piece_bytes(size_t bytes, size_t threads) {
  const size_t even = bytes / (threads * kPiecesEach) + 1;
  const size_t rounded = (even + kPieceUnit - 1) / kPieceUnit * kPieceUnit;
  return std::max(rounded, kLeastPiece);
}

void check_rules(const std::vector<CopyRule>& rules, size_t threads) {
  size_t least = 0;
  for (const CopyRule& rule : rules) {
    if (rule.from_bytes < least || (least == 0 && rule.from_bytes != 0)) {
      throw InvalidArgument(
          "copy rules must begin at 0 bytes and ascend: " + std::to_string(rule.from_bytes) +
          " follows " + std::to_string(least == 0 ? 0 : least - 1));
    }
    if (rule.way.threads == 0 || rule.way.threads > threads) {
      throw InvalidArgument("copy rule from " + std::to_string(rule.from_bytes) + " bytes with " +
                            std::to_string(rule.way.threads) + " threads: there are " +
                            std::to_string(threads));
    }
    least = rule.from_bytes + 1;
  }
  if (rules.empty()) throw InvalidArgument("copy rules: none given; give one from 0 bytes");
}

size_t first_other(const std::vector<CopyRule>& rules) {
  for (const CopyRule& rule : rules) {
    if (rule.way != CopyWay{}) return rule.from_bytes;
  }
  return SIZE_MAX;
}

}  // namespace

HostCopier::HostCopier(const std::vector<int>& helper_cpus, std::vector<CopyRule> rules, Isa isa)
    : team_((check_rules(rules, helper_cpus.size() + 1), helper_cpus)),
      rules_(std::move(rules)),
      first_other_(first_other(rules_)),
      stream_copy_(stream_copy(isa)) {}

std::vector<CopyRule> HostCopier::default_rules(size_t threads) {
  return {
      {0, {false, 1}}, {size_t{4} << 20, {false, threads}}, {size_t{32} << 20, {true, threads}}};
}

CopyWay HostCopier::way_of(size_t bytes) const {
  const auto after = std::ranges::upper_bound(rules_, bytes, {}, &CopyRule::from_bytes);
  return std::prev(after)->way;
}

void HostCopier::copy_one(bool non_temporal, std::byte* target, const std::byte* source,
                          size_t bytes) const {
  if (non_temporal && bytes >= kLeastStreamed) {
    stream_copy_(target, source, bytes);
  } else {
    std::memcpy(target, source, bytes);
  }
}

void HostCopier::copy_by(const CopyWay& way, std::byte* target, const std::byte* source,
                         size_t bytes) {
  if (way.threads <= 1) return copy_one(way.non_temporal, target, source, bytes);
  const size_t piece = piece_bytes(bytes, way.threads);
  team_.share_out((bytes + piece - 1) / piece, way.threads, [&](size_t i) {
    const size_t at = i * piece;
    copy_one(way.non_temporal, target + at, source + at, std::min(piece, bytes - at));
  });
}

void HostCopier::copy_blocks(std::span<const uint64_t> targets, std::span<const uint64_t> sources,
                             std::span<const size_t> sizes) {
  if (targets.size() != sources.size() || targets.size() != sizes.size()) {
    throw InvalidArgument("copy " + std::to_string(sources.size()) + " sources of " +
                          std::to_string(sizes.size()) + " sizes to " +
                          std::to_string(targets.size()) + " targets");
  }
  // first[i] is where block i begins among all bytes: large blocks are cut, small ones gathered.
  std::vector<size_t> first(sizes.size() + 1, 0);
  for (size_t i = 0; i < sizes.size(); ++i) first[i + 1] = first[i] + sizes[i];
  const size_t bytes = first.back();
  if (bytes == 0) return;
  const CopyWay way = way_of(bytes);
  const size_t piece = way.threads <= 1 ? bytes : piece_bytes(bytes, way.threads);
  team_.share_out((bytes + piece - 1) / piece, way.threads, [&](size_t p) {
    size_t at = p * piece;
    const size_t end = std::min(bytes, at + piece);
    size_t i = static_cast<size_t>(std::ranges::upper_bound(first, at) - first.begin()) - 1;
    for (; at < end; ++i) {
      const size_t into = at - first[i];
      const size_t held = std::min(first[i + 1], end) - at;
      const bool non_temporal = way.non_temporal && sizes[i] >= kLeastStreamedBlock;
      copy_one(non_temporal, reinterpret_cast<std::byte*>(targets[i]) + into,
               reinterpret_cast<const std::byte*>(sources[i]) + into, held);
      at += held;
    }
  });
}

void HostCopier::copy_strided(std::byte* target, const std::byte* source,
                              const StridedShape& shape) {
  const StridedRows rows(shape);
  if (rows.count() == 0) return;
  if (rows.count() == 1 && rows.contiguous()) return copy(target, source, rows.row_bytes());
  const CopyWay way = way_of(rows.count() * rows.row_bytes());
  const size_t pieces = std::min(rows.count(), way.threads * kPiecesEach);
  team_.share_out(pieces, way.threads, [&](size_t piece) {
    const size_t begin = rows.count() * piece / pieces, end = rows.count() * (piece + 1) / pieces;
    rows.visit(begin, end, [&](ptrdiff_t to, ptrdiff_t from) {
      if (rows.contiguous()) {
        const bool non_temporal = way.non_temporal && rows.row_bytes() >= kLeastStreamedBlock;
        copy_one(non_temporal, target + to, source + from, rows.row_bytes());
      } else {
        rows.copy_row(target + to, source + from);
      }
    });
  });
}

}  // namespace cxl_offload::transfer
