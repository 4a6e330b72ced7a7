// What libFuzzer drives, and test_fuzz_copies.cc replays: transfers of a copy engine on the fake
// driver, of which some fail, and copies in host memory. A transfer that reports success has moved
// every byte; one that failed touches its ends no more; at the end nothing is left.
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.h"
#include "failing_driver.h"
#include "fuzz_arrays.h"
#include "fuzz_input.h"
#include "transfer/copy_engine.h"

namespace cxl_offload::transfer {
namespace {

using gpu::Call;
using kernels::GuardedArray;
using kernels::Numbers;

GuardedArray random_array(size_t bytes, Numbers& numbers) {
  GuardedArray array(Dtype::kUint8, bytes, numbers.next() >> 58);
  for (size_t i = 0; i < bytes; ++i) array.data()[i] = static_cast<std::byte>(numbers.next() >> 56);
  return array;
}

// One copier for every table of rules; their helper threads stay.
HostCopier& any_copier(Input& input) {
  static std::map<size_t, std::unique_ptr<HostCopier>> copiers;
  const size_t which = input.below(6);
  std::unique_ptr<HostCopier>& copier = copiers[which];
  if (copier == nullptr) {
    const std::vector<std::vector<CopyRule>> tables = {
        {{0, {false, 1}}},
        {{0, {true, 1}}},
        {{0, {false, 1}}, {700, {true, 1}}},
        {{0, {false, 2}}},
        {{0, {true, 3}}},
        {{0, {false, 1}}, {100, {true, 2}}, {5000, {false, 3}}}};
    copier = std::make_unique<HostCopier>(std::vector<int>{0, 0}, tables[which]);
  }
  return *copier;
}

struct Transfer {
  Direction direction = Direction::kToDevice;
  std::optional<GuardedArray> host, device, expected;
  std::shared_ptr<CopyHandle> handle;

  GuardedArray& target() { return direction == Direction::kToDevice ? *device : *host; }
  void check() {
    require(target().same_bytes(*expected), "a transfer reports success and its bytes are wrong");
    require(host->guard_is_whole() && device->guard_is_whole(), "bytes before an end were written");
  }
};

class Engine {
 public:
  explicit Engine(Input& input) : numbers_(input.byte()) {
    EngineOptions options;
    options.chunk_bytes = 1 + input.size(600);
    options.limit_bytes = 1 + input.size(20000);
    for (Lane lane = -1; lane < 3; ++lane) {
      if (input.one_in(3)) options.rates[lane] = 1 + static_cast<double>(input.byte());
    }
    const size_t slots = input.one_in(8) ? 0 : 4 + input.below(9);
    staging_.emplace(Dtype::kUint8, slots * options.chunk_bytes + (slots == 0 ? 0 : input.below(3)),
                     input.below(64));
    driver_ = std::make_shared<gpu::FailingDriver>();
    const std::shared_ptr<HostCopier> copier(&any_copier(input), [](HostCopier*) {});
    engine_ = std::make_unique<CopyEngine>(driver_, copier,
                                           std::span(staging_->data(), staging_->bytes()), options);
  }

  void step(Input& input) {
    const size_t operation = input.below(16);
    if (operation < 7) {
      submit(input);
    } else if (operation < 9) {
      driver_->fail(input.any_of(std::vector{Call::kCopy, Call::kCopy, Call::kRecordEvent,
                                             Call::kStreamWait, Call::kCreateStream}),
                    1 + input.below(8));
    } else if (operation < 11 && !transfers_.empty()) {
      finish(input.byte() % transfers_.size(), input.below(2) == 0);
    } else if (operation < 14) {
      const auto streams = engine_->streams();
      if (!streams.empty())
        driver_->fake().step(streams[input.byte() % streams.size()], 1 + input.below(4));
    } else if (operation == 14) {
      driver_->fake().launch(50 + input.below(2));
    } else if (input.one_in(4)) {
      engine_->drain();
    } else if (!transfers_.empty()) {
      wait_in_stream(input, *transfers_[input.byte() % transfers_.size()]);
    }
  }

  void end(Input& input) {
    driver_->fail(Call::kCopy, 0);
    if (input.below(2) == 0) {
      engine_->drain();
      require(engine_->unfinished_bytes(Direction::kToDevice) == 0, "bytes not finished by drain");
      require(engine_->unfinished_bytes(Direction::kToHost) == 0, "bytes not finished by drain");
    }
    engine_.reset();
    staging_.reset();
    while (!transfers_.empty()) finish(transfers_.size() - 1, true);
    require(driver_->fake().counts().events == 0, "events that were not destroyed");
  }

 private:
  void submit(Input& input) {
    auto transfer = std::make_unique<Transfer>();
    transfer->direction = input.below(2) == 0 ? Direction::kToDevice : Direction::kToHost;
    const size_t count = input.below(7);
    std::vector<size_t> sizes;
    size_t total = 0;
    for (size_t i = 0; i < count; ++i) {
      sizes.push_back(input.one_in(8) ? 0 : input.size(2500));
      total += sizes.back();
    }
    transfer->host.emplace(random_array(total, numbers_));
    transfer->device.emplace(random_array(total, numbers_));
    const bool to_device = transfer->direction == Direction::kToDevice;
    transfer->expected.emplace(to_device ? *transfer->host : *transfer->device);
    std::vector<Piece> pieces;
    const size_t kinds = input.byte();
    for (size_t i = 0, at = 0; i < count; at += sizes[i], ++i) {
      const auto device = reinterpret_cast<uint64_t>(transfer->device->data() + at);
      const auto lane = static_cast<Lane>(numbers_.next() % (1 + kinds % 4)) - 1;
      const bool pinned = kinds < 64 || (kinds < 192 && numbers_.next() % 2 == 0);
      pieces.push_back({device, transfer->host->data() + at, sizes[i], lane, pinned});
    }
    std::vector<gpu::StreamId> after;
    for (size_t i = input.one_in(3) ? 1 + input.below(2) : 0; i > 0; --i) after.push_back(49 + i);
    try {
      transfer->handle = engine_->submit(transfer->direction, pieces, after, input.below(2) == 0);
    } catch (const InvalidArgument&) {
      require(staging_->bytes() == 0, "refused, and there is staging");
      return;
    } catch (const SystemError&) {
      require(driver_->failures() > 0, "failed, and no call did");
      return;
    }
    if (transfer->handle != nullptr) transfers_.push_back(std::move(transfer));
  }

  // Looks at a transfer; when it is over its ends go.
  void finish(size_t index, bool wait) {
    Transfer& transfer = *transfers_[index];
    try {
      if (wait) {
        transfer.handle->wait();
      } else if (!transfer.handle->query()) {
        return;
      }
      require(transfer.handle->query(), "waited for and not finished");
      transfer.check();
    } catch (const SystemError&) {
      require(driver_->failures() > 0, "failed, and no call did");
    }
    transfers_.erase(transfers_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void wait_in_stream(Input& input, Transfer& transfer) {
    const gpu::StreamId stream = 60 + input.below(2);
    try {
      transfer.handle->stream_wait(stream);
    } catch (const SystemError&) {
      require(driver_->failures() > 0, "failed, and no call did");
      return;
    }
    driver_->fake().finish(stream);
    transfer.check();
  }

  Numbers numbers_;
  std::optional<GuardedArray> staging_;
  std::shared_ptr<gpu::FailingDriver> driver_;
  std::unique_ptr<CopyEngine> engine_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
};

void fuzz_engine(Input& input) {
  Engine engine(input);
  while (!input.empty()) engine.step(input);
  engine.end(input);
}

void fuzz_blocks(Input& input, HostCopier& copier, Numbers& numbers) {
  std::vector<GuardedArray> sources, targets;
  std::vector<uint64_t> to, from;
  std::vector<size_t> sizes;
  for (size_t i = input.below(12); i > 0; --i) {
    sizes.push_back(input.one_in(8) ? 0 : input.size(9000));
    sources.push_back(random_array(sizes.back(), numbers));
    targets.push_back(random_array(sizes.back(), numbers));
    to.push_back(reinterpret_cast<uint64_t>(targets.back().data()));
    from.push_back(reinterpret_cast<uint64_t>(sources.back().data()));
  }
  copier.copy_blocks(to, from, sizes);
  for (size_t i = 0; i < sizes.size(); ++i) {
    require(targets[i].same_bytes(sources[i]) && targets[i].guard_is_whole(), "a block's bytes");
  }
}

// A strided side in exactly the memory that it spans; returns the place of its first element.
struct Side {
  Side(Input& input, const StridedShape& shape, bool may_repeat, Numbers& numbers) {
    auto unit = static_cast<ptrdiff_t>(shape.element_bytes);
    strides.resize(shape.shape.size());
    const size_t turn = input.byte();
    for (size_t i = 0; i < strides.size(); ++i) {
      const size_t dimension = (i + turn) % strides.size();
      const bool repeats = may_repeat && input.one_in(8);
      const bool backwards = input.one_in(6);
      unit += input.one_in(4) ? static_cast<ptrdiff_t>(input.below(9)) : 0;
      strides[dimension] = repeats ? 0 : backwards ? -unit : unit;
      const auto steps = static_cast<ptrdiff_t>(shape.shape[dimension]) - 1;
      if (strides[dimension] < 0 && steps > 0) first -= strides[dimension] * steps;
      if (!repeats && steps >= 0) unit = unit * steps + unit;
    }
    ptrdiff_t last = first + static_cast<ptrdiff_t>(shape.element_bytes);
    for (size_t i = 0; i < strides.size(); ++i) {
      const auto steps = static_cast<ptrdiff_t>(shape.shape[i]) - 1;
      if (strides[i] > 0 && steps > 0) last += strides[i] * steps;
    }
    array.emplace(random_array(static_cast<size_t>(last), numbers));
  }

  std::vector<ptrdiff_t> strides;
  ptrdiff_t first = 0;
  std::optional<GuardedArray> array;
};

void fuzz_strided(Input& input, HostCopier& copier, Numbers& numbers) {
  StridedShape shape;
  shape.element_bytes = input.any_of<size_t>({1, 2, 4, 8, 3, 16, 5});
  size_t count = 1;
  for (size_t i = input.below(6); i > 0; --i) {
    shape.shape.push_back(input.one_in(12) ? 0 : 1 + input.below(i < 3 ? 40 : 4));
    count *= shape.shape.back();
  }
  Side source(input, shape, true, numbers);
  Side target(input, shape, false, numbers);
  shape.source_strides = source.strides;
  shape.target_strides = target.strides;
  GuardedArray expected(*target.array);
  for (size_t index = 0; index < count; ++index) {
    ptrdiff_t to = target.first, from = source.first;
    for (size_t d = shape.shape.size(), rest = index; d-- > 0; rest /= shape.shape[d]) {
      const auto at = static_cast<ptrdiff_t>(rest % shape.shape[d]);
      to += at * target.strides[d];
      from += at * source.strides[d];
    }
    std::memcpy(expected.data() + to, source.array->data() + from, shape.element_bytes);
  }
  copier.copy_strided(target.array->data() + target.first, source.array->data() + source.first,
                      shape);
  require(target.array->same_bytes(expected) && target.array->guard_is_whole(), "strided bytes");
}

void fuzz_copies(Input& input) {
  const size_t kind = input.below(4);
  if (kind < 2) return fuzz_engine(input);
  Numbers numbers(input.byte());
  HostCopier& copier = any_copier(input);
  kind == 2 ? fuzz_blocks(input, copier, numbers) : fuzz_strided(input, copier, numbers);
}

}  // namespace
}  // namespace cxl_offload::transfer

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  cxl_offload::Input input(data, size);
  cxl_offload::transfer::fuzz_copies(input);
  return 0;
}
