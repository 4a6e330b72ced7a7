// Copies in host memory in the quickest way for their size: through the caches or past them, with
// one thread or several. A table, measured on the machine, says which way serves which size.
#ifndef CXL_OFFLOAD_TRANSFER_HOST_COPY_H_
#define CXL_OFFLOAD_TRANSFER_HOST_COPY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/cpu_features.h"
#include "transfer/copy_team.h"
#include "transfer/stream_copy.h"

namespace cxl_offload::transfer {

struct CopyWay {
  bool non_temporal = false;
  size_t threads = 1;

  bool operator==(const CopyWay&) const = default;
};

// Says how to copy this many bytes and more, up to the next entry.
struct CopyRule {
  size_t from_bytes = 0;
  CopyWay way;
};

// A tensor's elements, which may have gaps between them: strides are in bytes and may be negative
// or, in sources, zero.
struct StridedShape {
  std::vector<size_t> shape;
  std::vector<ptrdiff_t> target_strides;
  std::vector<ptrdiff_t> source_strides;
  size_t element_bytes = 1;
};

// Thread-safe. Sources and targets must not overlap.
class HostCopier {
 public:
  // `cpus` are those of the helpers beside the calling thread: best of the node of the target.
  // `rules` begin at 0 bytes and ascend; their threads are at most helpers + 1. Throws
  // InvalidArgument.
  HostCopier(const std::vector<int>& helper_cpus, std::vector<CopyRule> rules,
             Isa isa = best_isa());

  // The rules for machines that were not measured: several threads from 4 MiB on, and past the
  // caches from 32 MiB on.
  static std::vector<CopyRule> default_rules(size_t threads);

  void copy(std::byte* target, const std::byte* source, size_t bytes) {
    // This is inline, so that copies of a few nanoseconds go straight to memcpy.
    if (bytes < first_other_) {
      __builtin_memcpy(target, source, bytes);
    } else {
      copy_by(way_of(bytes), target, source, bytes);
    }
  }
  void copy_by(const CopyWay& way, std::byte* target, const std::byte* source, size_t bytes);
  // Does targets[i][:sizes[i]] = sources[i][:sizes[i]]. The way is chosen by all bytes together.
  void copy_blocks(std::span<const uint64_t> targets, std::span<const uint64_t> sources,
                   std::span<const size_t> sizes);
  // Throws InvalidArgument where the lists of lengths differ.
  void copy_strided(std::byte* target, const std::byte* source, const StridedShape& shape);

  CopyWay way_of(size_t bytes) const;
  size_t threads() const { return team_.threads(); }
  const std::vector<CopyRule>& rules() const { return rules_; }

 private:
  void copy_one(bool non_temporal, std::byte* target, const std::byte* source, size_t bytes) const;

  CopyTeam team_;
  const std::vector<CopyRule> rules_;
  size_t first_other_;  // the first size that is not a plain memcpy
  const StreamCopy stream_copy_;
};

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_HOST_COPY_H_
