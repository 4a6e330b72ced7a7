#include "kernels/attention_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>

#include "core/error.h"

namespace cxl_offload::kernels {
namespace {

std::string text(const std::vector<int64_t>& shape) {
  std::string joined;
  for (int64_t length : shape) joined += (joined.empty() ? "" : ", ") + std::to_string(length);
  return "(" + joined + ")";
}

void check_caches(const Attention& a) {
  if (a.k.shape.size() != 4 || a.v.shape.size() != 4) {
    throw InvalidArgument("attention: k " + text(a.k.shape) + " and v " + text(a.v.shape) +
                          " must have four dimensions: sequences or blocks, heads, positions, dim");
  }
  if (a.k.shape != a.v.shape) {
    throw InvalidArgument("attention: k " + text(a.k.shape) + " and v " + text(a.v.shape) +
                          " differ in shape");
  }
  if (a.k.dtype != a.v.dtype) {
    throw InvalidArgument("attention: k is " + dtype_name(a.k.dtype) + " and v is " +
                          dtype_name(a.v.dtype) + "; give both one type");
  }
  if (a.k.dtype == Dtype::kInt8) throw InvalidArgument("attention: k and v cannot be int8");
  for (const TensorView* view : {&a.k, &a.v}) {
    if (view->shape[3] > 1 && view->strides[3] != 1) {
      throw InvalidArgument(
          "attention: the last dimension of k and v must be contiguous, and has "
          "a stride of " +
          std::to_string(view->strides[3]));
    }
  }
}

// Of caches of codes: where their scales are, and how many codes a row has.
void check_groups(const Attention& a) {
  if (a.k.dtype != Dtype::kUint8) return;
  const std::vector<int64_t> outer(a.k.shape.begin(), a.k.shape.begin() + 3);
  for (const TensorView* view : {&a.k_groups, &a.v_groups}) {
    const bool fits = view->dtype == Dtype::kFloat16 && view->shape.size() == 5 &&
                      view->shape[4] == 2 && view->strides[4] == 1 &&
                      (view->strides[3] == 2 || view->shape[3] == 1) &&
                      view->shape == a.k_groups.shape &&
                      std::vector(view->shape.begin(), view->shape.begin() + 3) == outer;
    if (fits) continue;
    throw InvalidArgument("attention: scales " + text(view->shape) + " of " +
                          dtype_name(view->dtype) + " for codes " + text(a.k.shape) +
                          "; give float16 of the same first three dimensions, then groups and 2, "
                          "both contiguous");
  }
  const int64_t groups = a.k_groups.shape[3];
  const int64_t codes = a.k.shape[3] * 2;
  const int64_t each = groups == 0 ? 0 : codes / groups;
  if (each < 64 || each % 64 != 0 || each * groups != codes) {
    throw InvalidArgument("attention: " + std::to_string(groups) + " groups in a row of " +
                          std::to_string(codes) + " codes; a group has a multiple of 64");
  }
  const int64_t dim = a.q.shape.size() == 3 ? a.q.shape[2] : 0;
  if (dim > codes || dim <= codes - each) {
    throw InvalidArgument("attention: q has heads of " + std::to_string(dim) +
                          " numbers, k and v " + "rows of " + std::to_string(codes) +
                          " codes in groups of " + std::to_string(each));
  }
}

void check_queries(const Attention& a) {
  if (a.q.shape.size() != 3 || !a.q.is_contiguous()) {
    throw InvalidArgument("attention: q " + text(a.q.shape) +
                          " must be contiguous of three dimensions: sequences, heads, dim");
  }
  if (a.out.shape != a.q.shape || !a.out.is_contiguous()) {
    throw InvalidArgument("attention: out " + text(a.out.shape) + " must be contiguous like q " +
                          text(a.q.shape));
  }
  if (a.queries < 1 || a.q.shape[1] % a.queries != 0) {
    throw InvalidArgument("attention: " + std::to_string(a.queries) + " queries a head in q " +
                          text(a.q.shape) + "; give at least one, alike for all heads");
  }
  const int64_t heads = a.q.shape[1] / a.queries;
  const int64_t kv_heads = a.k.shape[1];
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
    throw InvalidArgument("attention: " + std::to_string(heads) +
                          " heads of q are no multiple of " + std::to_string(kv_heads) +
                          " of k and v");
  }
  for (const TensorView* view : {&a.q, &a.out}) {
    if (is_written(view->dtype)) continue;
    throw InvalidArgument("attention: q and out of " + dtype_name(view->dtype) +
                          "; only k and v may be of 8 bits");
  }
  if (a.k.dtype != Dtype::kUint8 && a.q.shape[2] != a.k.shape[3]) {
    throw InvalidArgument("attention: q has heads of " + std::to_string(a.q.shape[2]) +
                          " numbers, k and v of " + std::to_string(a.k.shape[3]));
  }
}

void check_scales(const Attention& a) {
  const size_t heads = static_cast<size_t>(a.k.shape[1]);
  for (const std::vector<float>* scales : {&a.k_scales, &a.v_scales}) {
    if (scales->size() > 1 && scales->size() != heads) {
      throw InvalidArgument("attention: " + std::to_string(scales->size()) + " scales of k or v, " +
                            "which have " + std::to_string(heads) + " heads; give one or as many");
    }
    for (float scale : *scales) {
      if (!std::isfinite(scale)) {
        throw InvalidArgument("attention: a scale of k or v is not finite");
      }
    }
  }
}

// Positions that a sequence may have.
int64_t capacity(const Attention& a) {
  return a.table.data == nullptr ? a.k.shape[2] : a.table.columns * a.k.shape[2];
}

void check_lengths(const Attention& a) {
  const int64_t batch = a.q.shape[0];
  const bool in_blocks = a.table.data != nullptr;
  if (!in_blocks && a.k.shape[0] != batch) {
    throw InvalidArgument("attention: k and v are of " + std::to_string(a.k.shape[0]) +
                          " sequences, q of " + std::to_string(batch));
  }
  if (in_blocks && a.lengths.empty() && batch != 0) {
    throw InvalidArgument("attention: a cache in blocks needs the lengths of its sequences");
  }
  if (!a.lengths.empty() && static_cast<int64_t>(a.lengths.size()) != batch) {
    throw InvalidArgument("attention: " + std::to_string(a.lengths.size()) + " lengths for " +
                          std::to_string(batch) + " sequences");
  }
  for (int64_t length : a.lengths) {
    if (length >= 0 && length <= capacity(a)) continue;
    throw InvalidArgument("attention: a sequence of length " + std::to_string(length) +
                          "; k and v hold 0 to " + std::to_string(capacity(a)));
  }
}

// What becomes of scores. After check_lengths().
void check_rules(const Attention& a) {
  const auto cap = static_cast<float>(a.soft_cap);
  if (!std::isfinite(cap) || a.soft_cap < 0 || (cap == 0 && a.soft_cap > 0)) {
    std::array<char, 32> digits{};
    std::snprintf(digits.data(), digits.size(), "%g", a.soft_cap);
    throw InvalidArgument(std::string("attention: soft_cap ") + digits.data() +
                          "; give a positive number that float32 holds, or 0 for none");
  }
  const auto heads = static_cast<size_t>(a.q.shape[1] / a.queries);
  if (!a.sinks.empty() && a.sinks.size() != heads) {
    throw InvalidArgument("attention: " + std::to_string(a.sinks.size()) + " sinks for " +
                          std::to_string(heads) + " heads");
  }
  for (float sink : a.sinks) {
    if (std::isnan(sink)) throw InvalidArgument("attention: a sink is not a number");
  }
  if (a.bias.data == nullptr) return;
  int64_t most = a.lengths.empty() ? a.k.shape[2] : 0;
  for (int64_t length : a.lengths) most = std::max(most, length);
  const std::vector<int64_t> outer = {a.q.shape[0], static_cast<int64_t>(heads), a.queries};
  const bool fits = a.bias.dtype == Dtype::kFloat32 && a.bias.shape.size() == 4 &&
                    std::vector(a.bias.shape.begin(), a.bias.shape.begin() + 3) == outer &&
                    a.bias.shape[3] >= most;
  if (fits) return;
  throw InvalidArgument("attention: bias " + text(a.bias.shape) + " of " +
                        dtype_name(a.bias.dtype) + "; give float32 " + text(outer) + " by " +
                        std::to_string(most) + " positions at least");
}

void check_table(const Attention& a) {
  if (a.table.data == nullptr) return;
  const int64_t block = a.k.shape[2];
  for (size_t i = 0; i < a.lengths.size(); ++i) {
    const int64_t used = block == 0 ? 0 : (a.lengths[i] + block - 1) / block;
    for (int64_t column = 0; column < used; ++column) {
      const int32_t index = a.table.data[static_cast<int64_t>(i) * a.table.stride + column];
      if (index >= 0 && index < a.k.shape[0]) continue;
      throw InvalidArgument("attention: sequence " + std::to_string(i) + " is in block " +
                            std::to_string(index) + "; there are " + std::to_string(a.k.shape[0]));
    }
  }
}

}  // namespace

void check_attention(const Attention& a) {
  check_caches(a);
  check_queries(a);
  check_groups(a);
  check_scales(a);
  check_lengths(a);
  check_rules(a);
  check_table(a);
  if (a.mask != nullptr && a.mask_columns < capacity(a)) {
    throw InvalidArgument("attention: a mask of " + std::to_string(a.mask_columns) +
                          " positions; k and v hold " + std::to_string(capacity(a)));
  }
  if (a.window < 0) {
    throw InvalidArgument("attention: window " + std::to_string(a.window) + "; give 0 or more");
  }
  if (!std::isfinite(static_cast<float>(a.scale))) {
    throw InvalidArgument("attention: the scale is not finite in float32");
  }
}

}  // namespace cxl_offload::kernels
