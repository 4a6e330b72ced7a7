// Which node every page of one simulated mapping is on.
#ifndef CXL_OFFLOAD_OS_PAGE_MAP_H_
#define CXL_OFFLOAD_OS_PAGE_MAP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace cxl_offload::os {

// States of pages 0..size-1: a node, or -errno for a page that is not there. Blocks of pages with
// one state cost 16 bytes, others two bytes a page, so that terabytes can be mapped on a laptop.
// Not thread-safe.
class PageMap {
 public:
  using RunVisitor = std::function<void(size_t first, size_t count, int state)>;

  explicit PageMap(size_t pages);

  size_t size() const { return pages_; }
  int get(size_t page) const;
  void fill(size_t first, size_t count, int state);
  // Pages from `first` on with the same state as `first`, within the next `count`.
  size_t run_length(size_t first, size_t count) const;
  // Calls `visit` for maximal runs of one state in [first, first + count), in order. The visitor
  // may fill the run it is given.
  void for_each_run(size_t first, size_t count, const RunVisitor& visit) const;

 private:
  static constexpr size_t kBlockPages = 512;

  struct Block {
    int16_t state;                    // the state of all pages, unless `each` is set
    std::unique_ptr<int16_t[]> each;  // kBlockPages states
  };

  size_t pages_;
  std::vector<Block> blocks_;
};

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_PAGE_MAP_H_
