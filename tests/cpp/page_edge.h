// Memory that ends where a page ends that nobody may read, so that a read beyond it is seen on
// every processor, also under an emulator that has no address sanitizer.
#ifndef CXL_OFFLOAD_TESTS_PAGE_EDGE_H_
#define CXL_OFFLOAD_TESTS_PAGE_EDGE_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace cxl_offload {

// A copy of some bytes. They cannot be written.
class PageEdge {
 public:
  PageEdge(const void* bytes, size_t count) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t kept = (count + page - 1) / page * page;
    mapped_ = kept + page;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::runtime_error("no memory for a page's edge");
    data_ = static_cast<std::byte*>(base_) + kept - count;
    std::memcpy(data_, bytes, count);
    mprotect(base_, kept, PROT_READ);
    mprotect(static_cast<std::byte*>(base_) + kept, page, PROT_NONE);
  }
  ~PageEdge() { munmap(base_, mapped_); }
  PageEdge(const PageEdge&) = delete;
  PageEdge& operator=(const PageEdge&) = delete;

  std::byte* data() const { return data_; }

 private:
  void* base_ = nullptr;
  size_t mapped_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_TESTS_PAGE_EDGE_H_
