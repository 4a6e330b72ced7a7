#include "probe/random.h"

#include "core/error.h"
#include "probe/team.h"

namespace cxl_offload::probe {

void fill_random(std::span<std::byte> buffer, uint64_t seed, const std::vector<int>& cpus) {
  constexpr size_t kWord = sizeof(uint64_t);
  if (reinterpret_cast<uintptr_t>(buffer.data()) % kWord != 0 || buffer.size() % kWord != 0) {
    throw InvalidArgument("fill " + format_bytes(buffer.size()) +
                          " with random words: needs whole words of 8 bytes at a multiple of 8");
  }
  const size_t words = buffer.size() / kWord;
  run_team(cpus, [&](size_t i, Clock::time_point) {
    const size_t begin = words / cpus.size() * i;
    const size_t end = i + 1 == cpus.size() ? words : words / cpus.size() * (i + 1);
    auto* data = reinterpret_cast<uint64_t*>(buffer.data());
    Random random(seed);
    random.skip(begin);
    for (size_t word = begin; word < end; ++word) data[word] = random.next();
  });
}

}  // namespace cxl_offload::probe
