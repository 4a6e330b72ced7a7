#include "transfer/copy_timing.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "core/error.h"

namespace cxl_offload {
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

template <typename Copy>
double seconds_of(const Copy& copy) {
  const auto begin = Clock::now();
  copy();
  return std::chrono::duration<double>(Clock::now() - begin).count();
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
                         int rounds) {
  if (targets.size() != sizes.size() || sources.size() != sizes.size()) {
    throw InvalidArgument("time blocks: " + std::to_string(sources.size()) + " sources of " +
                          std::to_string(sizes.size()) + " sizes to " +
                          std::to_string(targets.size()) + " targets");
  }
  BlockSamples samples;
  const auto own = [&] { copier.copy_blocks(targets, sources, sizes); };
  const auto memcpys = [&] { memcpy_each(targets, sources, sizes); };
  for (int round = -1; round < rounds; ++round) {  // the first wakes threads and is not counted
    const bool own_first = round % 2 == 0;
    const double first = own_first ? seconds_of(own) : seconds_of(memcpys);
    const double second = own_first ? seconds_of(memcpys) : seconds_of(own);
    if (round < 0) continue;
    samples.own.push_back(own_first ? first : second);
    samples.memcpys.push_back(own_first ? second : first);
  }
  return samples;
}

}  // namespace cxl_offload
