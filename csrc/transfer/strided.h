// Takes a strided copy apart into rows. Dimensions are put into the order of the target's memory,
// and neighbours are joined where both sides allow it.
#ifndef CXL_OFFLOAD_TRANSFER_STRIDED_H_
#define CXL_OFFLOAD_TRANSFER_STRIDED_H_

#include <cstddef>
#include <vector>

namespace cxl_offload::transfer {

struct StridedShape;

class StridedRows {
 public:
  // Throws InvalidArgument where the numbers of dimensions differ or elements have no bytes.
  explicit StridedRows(const StridedShape& shape);

  size_t count() const { return count_; }  // 0 for a tensor without elements
  size_t row_bytes() const { return row_elements_ * element_bytes_; }
  // Whether the elements of a row follow each other on both sides.
  bool contiguous() const { return contiguous_; }
  // Copies one row whose elements are apart.
  void copy_row(std::byte* target, const std::byte* source) const;

  // Calls act(target offset, source offset) for rows [begin, end).
  template <typename Act>
  void visit(size_t begin, size_t end, const Act& act) const {
    std::vector<size_t> index(outer_.size());
    ptrdiff_t to = 0, from = 0;
    size_t rest = begin;
    for (size_t d = outer_.size(); d-- > 0;) {
      index[d] = rest % outer_[d].length;
      rest /= outer_[d].length;
      to += static_cast<ptrdiff_t>(index[d]) * outer_[d].target_stride;
      from += static_cast<ptrdiff_t>(index[d]) * outer_[d].source_stride;
    }
    for (size_t row = begin; row < end; ++row) {
      act(to, from);
      for (size_t d = outer_.size(); d-- > 0;) {
        to += outer_[d].target_stride;
        from += outer_[d].source_stride;
        if (++index[d] < outer_[d].length) break;
        to -= static_cast<ptrdiff_t>(outer_[d].length) * outer_[d].target_stride;
        from -= static_cast<ptrdiff_t>(outer_[d].length) * outer_[d].source_stride;
        index[d] = 0;
      }
    }
  }

 private:
  struct Dimension {
    size_t length;
    ptrdiff_t target_stride;
    ptrdiff_t source_stride;
  };

  template <typename Unit>
  void copy_units(std::byte* target, const std::byte* source) const;

  size_t element_bytes_;
  std::vector<Dimension> outer_;
  size_t count_ = 1;
  size_t row_elements_ = 1;
  ptrdiff_t target_stride_ = 0;  // inside a row
  ptrdiff_t source_stride_ = 0;
  bool contiguous_ = true;
};

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_STRIDED_H_
