// Tells a forked child from the process in which an object was made, for less than a system call.
#ifndef CXL_OFFLOAD_MEMORY_FORK_GUARD_H_
#define CXL_OFFLOAD_MEMORY_FORK_GUARD_H_

#include <sys/types.h>

#include <cstddef>

namespace cxl_offload {

class ForkGuard {
 public:
  // With `by_page` false the process id decides, as where the kernel is too old.
  explicit ForkGuard(bool by_page = true);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // Whether this is a child forked after the guard was made.
  bool in_child() const noexcept;

 private:
  pid_t pid_;
  size_t page_bytes_;
  // A page that the kernel hands to children zeroed (MADV_WIPEONFORK); null where it cannot, and
  // the process id decides.
  volatile unsigned char* page_ = nullptr;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_MEMORY_FORK_GUARD_H_
