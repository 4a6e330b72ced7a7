#include "transfer/strided.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/error.h"
#include "transfer/host_copy.h"

namespace cxl_offload::transfer {

StridedRows::StridedRows(const StridedShape& shape) : element_bytes_(shape.element_bytes) {
  const size_t ranks[] = {shape.shape.size(), shape.target_strides.size(),
                          shape.source_strides.size()};
  if (ranks[0] != ranks[1] || ranks[0] != ranks[2]) {
    throw InvalidArgument("strided copy: " + std::to_string(ranks[0]) + " lengths, " +
                          std::to_string(ranks[1]) + " target strides and " +
                          std::to_string(ranks[2]) + " source strides");
  }
  if (element_bytes_ == 0) throw InvalidArgument("strided copy: elements of 0 bytes");
  std::vector<Dimension> dimensions;
  for (size_t d = 0; d < shape.shape.size(); ++d) {
    if (shape.shape[d] == 0) count_ = 0;
    if (shape.shape[d] > 1) {
      dimensions.push_back({shape.shape[d], shape.target_strides[d], shape.source_strides[d]});
    }
  }
  if (count_ == 0) return;
  std::ranges::stable_sort(dimensions, [](const Dimension& a, const Dimension& b) {
    return std::abs(a.target_stride) > std::abs(b.target_stride);
  });
  for (const Dimension& each : dimensions) {
    const auto length = static_cast<ptrdiff_t>(each.length);
    if (!outer_.empty() && outer_.back().target_stride == length * each.target_stride &&
        outer_.back().source_stride == length * each.source_stride) {
      outer_.back() = {outer_.back().length * each.length, each.target_stride, each.source_stride};
    } else {
      outer_.push_back(each);
    }
  }
  if (!outer_.empty()) {
    row_elements_ = outer_.back().length;
    target_stride_ = outer_.back().target_stride;
    source_stride_ = outer_.back().source_stride;
    const auto element = static_cast<ptrdiff_t>(element_bytes_);
    contiguous_ = target_stride_ == element && source_stride_ == element;
    outer_.pop_back();
  }
  for (const Dimension& each : outer_) count_ *= each.length;
}

template <typename Unit>
void StridedRows::copy_units(std::byte* target, const std::byte* source) const {
  for (size_t i = 0; i < row_elements_; ++i) {
    Unit unit;
    std::memcpy(&unit, source, sizeof(unit));
    std::memcpy(target, &unit, sizeof(unit));
    target += target_stride_;
    source += source_stride_;
  }
}

void StridedRows::copy_row(std::byte* target, const std::byte* source) const {
  switch (element_bytes_) {
    case 1:
      return copy_units<uint8_t>(target, source);
    case 2:
      return copy_units<uint16_t>(target, source);
    case 4:
      return copy_units<uint32_t>(target, source);
    case 8:
      return copy_units<uint64_t>(target, source);
    default:
      break;
  }
  for (size_t i = 0; i < row_elements_; ++i) {
    std::memcpy(target, source, element_bytes_);
    target += target_stride_;
    source += source_stride_;
  }
}

}  // namespace cxl_offload::transfer
