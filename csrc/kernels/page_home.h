// Which node a byte is on, so that threads begin with the work that is near them.
#ifndef CXL_OFFLOAD_KERNELS_PAGE_HOME_H_
#define CXL_OFFLOAD_KERNELS_PAGE_HOME_H_

#include <cstddef>
#include <cstdint>

#include "os/kernel.h"

namespace cxl_offload::kernels {

// A call asks about at most so many units of work: asking takes as long as reading about 20 KiB.
inline constexpr size_t kMostAsked = 64;

// The node of the page that holds this byte. Below zero: no page is there yet, or it is not known.
inline int page_home(const std::byte* at, const os::Kernel& kernel) {
  const size_t page = kernel.page_bytes(os::PageKind::kBase);
  std::byte* begin = const_cast<std::byte*>(at) - reinterpret_cast<uintptr_t>(at) % page;
  int node = -1;
  kernel.query({begin, page}, page, {&node, 1});
  return node;
}

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_PAGE_HOME_H_
