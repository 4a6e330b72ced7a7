#include "os/page_map.h"

#include <algorithm>

#include "os/kernel.h"

namespace cxl_offload::os {

static_assert(kMaxNodes <= INT16_MAX, "a node fits a page's state");

PageMap::PageMap(size_t pages) : pages_(pages), blocks_((pages + kBlockPages - 1) / kBlockPages) {
  for (Block& block : blocks_) block.state = kPageAbsent;
}

int PageMap::get(size_t page) const {
  const Block& block = blocks_[page / kBlockPages];
  return block.each ? block.each[page % kBlockPages] : block.state;
}

void PageMap::fill(size_t first, size_t count, int state) {
  const auto value = static_cast<int16_t>(state);
  while (count > 0) {
    Block& block = blocks_[first / kBlockPages];
    const size_t begin = first % kBlockPages;
    const size_t in_block = std::min(kBlockPages, pages_ - (first - begin));
    const size_t here = std::min(count, in_block - begin);
    if (here == in_block) {
      block.each.reset();
      block.state = value;
    } else if (block.each || block.state != value) {
      if (!block.each) {
        block.each = std::make_unique<int16_t[]>(kBlockPages);
        std::fill_n(block.each.get(), kBlockPages, block.state);
      }
      std::fill_n(block.each.get() + begin, here, value);
    }
    first += here;
    count -= here;
  }
}

size_t PageMap::run_length(size_t first, size_t count) const {
  const int state = get(first);
  size_t length = 0;
  while (length < count) {
    const size_t page = first + length;
    const Block& block = blocks_[page / kBlockPages];
    const size_t begin = page % kBlockPages;
    const size_t here = std::min(count - length, kBlockPages - begin);
    if (!block.each) {
      if (block.state != state) break;
      length += here;
      continue;
    }
    const int16_t* at = block.each.get() + begin;
    const int16_t* other = std::find_if(at, at + here, [&](int16_t s) { return s != state; });
    length += static_cast<size_t>(other - at);
    if (other != at + here) break;
  }
  return length;
}

void PageMap::for_each_run(size_t first, size_t count, const RunVisitor& visit) const {
  while (count > 0) {
    const size_t length = run_length(first, count);
    visit(first, length, get(first));
    first += length;
    count -= length;
  }
}

}  // namespace cxl_offload::os
