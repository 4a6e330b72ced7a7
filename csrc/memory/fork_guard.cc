#include "memory/fork_guard.h"

#include <sys/mman.h>
#include <unistd.h>

namespace cxl_offload {

ForkGuard::ForkGuard(bool by_page)
    : pid_(getpid()), page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  if (!by_page) return;
  void* page =
      mmap(nullptr, page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (madvise(page, page_bytes_, MADV_WIPEONFORK) != 0) {
    munmap(page, page_bytes_);
    return;
  }
  page_ = static_cast<volatile unsigned char*>(page);
  *page_ = 1;
}

ForkGuard::~ForkGuard() {
  if (page_ != nullptr) munmap(const_cast<unsigned char*>(page_), page_bytes_);
}

bool ForkGuard::in_child() const noexcept {
  return page_ != nullptr ? *page_ == 0 : getpid() != pid_;
}

}  // namespace cxl_offload
