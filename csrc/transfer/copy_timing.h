// Times each way of copying on this machine, with nothing else between the copies.
#ifndef CXL_OFFLOAD_TRANSFER_COPY_TIMING_H_
#define CXL_OFFLOAD_TRANSFER_COPY_TIMING_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transfer/host_copy.h"

namespace cxl_offload::transfer {

// One contender: a way of copying that the copier has, or the way that it chooses for the size.
struct CopyContender {
  bool chosen = false;  // HostCopier::copy
  CopyWay way;
};

// Measures the seconds of a copy of `bytes`: `rounds` samples of every contender, in turns. A
// sample is the mean over the copies that fit into `sample_s`. They go through both buffers, one
// after the other; where the buffers are larger than the caches, every copy finds its bytes in
// memory. Throws InvalidArgument for buffers smaller than a copy.
std::vector<std::vector<double>> time_copies(HostCopier& copier, std::span<std::byte> target,
                                             std::span<const std::byte> source, size_t bytes,
                                             std::span<const CopyContender> contenders, int rounds,
                                             double sample_s);

struct BlockSamples {
  std::vector<double> own;      // HostCopier::copy_blocks
  std::vector<double> memcpys;  // a memcpy of each block, one after the other
};

// Measures the seconds to copy `job` blocks at once: `rounds` samples of both ways, in turns. The
// samples go through the lists, which are as of HostCopier::copy_blocks; where all blocks together
// are larger than the caches, every sample finds its bytes in memory. Throws InvalidArgument for
// lists that differ in length, or are shorter than a job.
BlockSamples time_blocks(HostCopier& copier, std::span<const uint64_t> targets,
                         std::span<const uint64_t> sources, std::span<const size_t> sizes,
                         size_t job, int rounds);

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_COPY_TIMING_H_
