// Memory that is kept from one use to the next.
#ifndef CXL_OFFLOAD_KERNELS_KEPT_H_
#define CXL_OFFLOAD_KERNELS_KEPT_H_

#include <cstddef>
#include <memory>

namespace cxl_offload::kernels {

// An array of numbers that only grows. Memory that is given back after every use comes back as new
// pages, and making these takes longer than reading the weights of a small layer.
template <class T>
struct Kept {
  // Returns room for at least so many numbers, with any values.
  T* of(size_t count) {
    if (count > size) {
      data = std::make_unique_for_overwrite<T[]>(count);
      size = count;
    }
    return data.get();
  }

  // Gives the memory back if it is more than so many numbers.
  void keep_at_most(size_t count) {
    if (size <= count) return;
    data.reset();
    size = 0;
  }

  std::unique_ptr<T[]> data;
  size_t size = 0;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_KEPT_H_
