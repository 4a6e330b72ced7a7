#include "transfer/copy_timing.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "core/error.h"

namespace cxl_offload::transfer {
namespace {

using Clock = std::chrono::steady_clock;

// Goes through both buffers, one copy's bytes after another.
class Walk {
 public:
  Walk(std::span<std::byte> target, std::span<const std::byte> source, size_t bytes)
      : target_(target.data()), source_(source.data()), bytes_(bytes) {
    const size_t step = (bytes + kStep - 1) / kStep * kStep;
    step_ = step;
    places_ = std::max<size_t>(1, std::min(target.size(), source.size()) / step);
  }

  double run(HostCopier& copier, const CopyContender& contender, size_t copies) {
    const auto begin = Clock::now();
    for (size_t i = 0; i < copies; ++i) {
      if (at_ == places_) at_ = 0;
      const size_t offset = at_++ * step_;
      if (contender.chosen) {
        copier.copy(target_ + offset, source_ + offset, bytes_);
      } else {
        copier.copy_by(contender.way, target_ + offset, source_ + offset, bytes_);
      }
    }
    const std::chrono::duration<double> took = Clock::now() - begin;
    return took.count() / static_cast<double>(copies);
  }

 private:
  static constexpr size_t kStep = 64;

  std::byte* target_;
  const std::byte* source_;
  size_t bytes_;
  size_t step_ = 0;
  size_t places_ = 1;
  size_t at_ = 0;
};

void memcpy_each(std::span<const uint64_t> targets, std::span<const uint64_t> sources,
                 std::span<const size_t> sizes) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::memcpy(reinterpret_cast<std::byte*>(targets[i]),
                reinterpret_cast<const std::byte*>(sources[i]), sizes[i]);
  }
}

}  // namespace

std::vector<std::vector<double>> time_copies(HostCopier& copier, std::span<std::byte> target,
                                             std::span<const std::byte> source, size_t bytes,
                                             std::span<const CopyContender> contenders, int rounds,
                                             double sample_s) {
  if (bytes == 0 || target.size() < bytes || source.size() < bytes) {
    throw InvalidArgument("time copies of " + format_bytes(bytes) + " between buffers of " +
                          format_bytes(source.size()) + " and " + format_bytes(target.size()));
  }
  Walk walk(target, source, bytes);
  std::vector<size_t> copies;
  for (const CopyContender& contender : contenders) {
    const double once = std::max(walk.run(copier, contender, 3), 1e-9);
    copies.push_back(std::max<size_t>(1, static_cast<size_t>(sample_s / once)));
  }
  std::vector<std::vector<double>> samples(contenders.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t k = 0; k < contenders.size(); ++k) {
      const size_t i = round % 2 == 0 ? k : contenders.size() - 1 - k;
      samples[i].push_back(walk.run(copier, contenders[i], copies[i]));
    }
  }
  return samples;
}

BlockSamples time_blocks(HostCopier& copier, std::span<const uint64_t> targets,
                         std::span<const uint64_t> sources, std::span<const size_t> sizes,
                         size_t job, int rounds) {
  if (targets.size() != sizes.size() || sources.size() != sizes.size() || job == 0 ||
      job > sizes.size()) {
    throw InvalidArgument("time jobs of " + std::to_string(job) +
                          " blocks: " + std::to_string(sources.size()) + " sources, " +
                          std::to_string(sizes.size()) + " sizes, " +
                          std::to_string(targets.size()) + " targets; at least a job, all alike");
  }
  BlockSamples samples;
  size_t at = 0;
  const auto sample = [&](bool own) {
    if (at + job > sizes.size()) at = 0;
    const auto to = targets.subspan(at, job);
    const auto from = sources.subspan(at, job);
    const auto bytes = sizes.subspan(at, job);
    at += job;
    const auto begin = Clock::now();
    if (own) {
      copier.copy_blocks(to, from, bytes);
    } else {
      memcpy_each(to, from, bytes);
    }
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  sample(true);  // wakes the threads
  for (int round = 0; round < rounds; ++round) {
    for (const bool own : {round % 2 == 0, round % 2 != 0}) {
      (own ? samples.own : samples.memcpys).push_back(sample(own));
    }
  }
  return samples;
}

}  // namespace cxl_offload::transfer
