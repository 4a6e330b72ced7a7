#include "memory/mapping.h"

#include <algorithm>

#include "os/lost_ranges.h"
#include "os/watched_ranges.h"

namespace cxl_offload::memory {

Mapping::Mapping(std::shared_ptr<os::Kernel> kernel, size_t bytes, size_t alignment,
                 os::PageKind kind)
    : kernel_(std::move(kernel)), bytes_(bytes), address_(kernel_->map(bytes, alignment, kind)) {
  os::watch({range(), kernel_->page_bytes(kind), false});
}

Mapping::~Mapping() {
  size_t begin = 0;
  for (const auto& [released_begin, released_end] : released_) {
    if (released_begin > begin) unmap(begin, released_begin - begin);
    begin = released_end;
  }
  if (begin < bytes_) unmap(begin, bytes_ - begin);
}

void Mapping::unmap(size_t offset, size_t bytes) noexcept {
  os::unwatch(range().subspan(offset, bytes));
  os::settle(range().subspan(offset, bytes));
  kernel_->unmap(range().subspan(offset, bytes));
}

void Mapping::release(size_t offset, size_t bytes) {
  // The list grows first, because growing may fail and unmapping may not.
  auto next = std::ranges::lower_bound(released_, std::pair{offset, size_t{0}});
  next = released_.insert(next, {offset, offset + bytes});
  unmap(offset, bytes);
  const auto after = std::next(next);
  if (after != released_.end() && after->first == next->second) {
    next->second = after->second;
    released_.erase(after);
  }
  if (next != released_.begin() && std::prev(next)->second == next->first) {
    std::prev(next)->second = next->second;
    released_.erase(next);
  }
}

}  // namespace cxl_offload::memory
