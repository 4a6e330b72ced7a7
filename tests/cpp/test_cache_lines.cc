// Writing lines back changes nothing, and touches no page but those of the range.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <span>

#include "check.h"
#include "os/cache_lines.h"

namespace cxl_offload::os {

TEST(any_range_keeps_its_bytes_and_neighbours_are_not_touched) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* raw = mmap(nullptr, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(raw != MAP_FAILED);
  auto* middle = static_cast<std::byte*>(raw) + page;
  CHECK_EQ(mprotect(middle, page, PROT_READ | PROT_WRITE), 0);
  std::memset(middle, 0x5a, page);
  for (const size_t begin : {size_t{0}, size_t{1}, size_t{63}, page - 65, page - 1}) {
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{64}, size_t{65}, page}) {
      if (begin + bytes <= page) write_back_lines({middle + begin, bytes});
    }
  }
  size_t kept = 0;
  for (size_t at = 0; at < page; ++at) kept += middle[at] == std::byte{0x5a} ? 1 : 0;
  CHECK_EQ(kept, page);
  munmap(raw, 3 * page);
}

TEST(empty_range_is_nothing) { write_back_lines({}); }

}  // namespace cxl_offload::os
