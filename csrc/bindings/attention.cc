#include "kernels/attention.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/bind.h"
#include "bindings/lost.h"
#include "core/error.h"
#include "kernels/attention_check.h"
#include "kernels/linear.h"

namespace cxl_offload::bindings {

namespace py = pybind11;

namespace {

// What `isa` may ask for besides instruction sets.
constexpr const char* kIntegerCodes = "avx512vnni";
constexpr const char* kBf16Products = "avx512bf16";

// Its values besides instruction sets here, for a message.
std::string other_names() {
  return (has_integer_codes() ? std::string(", ") + kIntegerCodes : "") +
         (has_bf16_vectors() ? std::string(", ") + kBf16Products : "");
}

// Lets `given` have what `isa` asks for, and returns the instruction set of the rest.
Isa take_isa(kernels::Attention& given, const std::string& isa) {
  given.integers = isa.empty() || isa == kIntegerCodes;
  given.bf16_products = isa.empty() ? kernels::has_fast_bf16_products() : isa == kBf16Products;
  if (isa == kIntegerCodes && !has_integer_codes()) {
    throw InvalidArgument("instruction set '" + isa + "': this processor has no AVX512-VNNI");
  }
  if (isa == kBf16Products && !has_bf16_vectors()) {
    throw InvalidArgument("instruction set '" + isa + "': this processor has no AVX512-BF16");
  }
  const bool is_best = isa.empty() || isa == kIntegerCodes || isa == kBf16Products;
  return is_best ? best_isa() : parse_isa(isa, other_names());
}

// Adds what is read of keys or values, or of the scales of their groups: the positions that
// sequences have, in blocks of a table or side by side.
void add_cache(const kernels::Attention& given, const TensorView& cache, LostParts& lost) {
  if (cache.data == nullptr) return;
  const bool is_paged = given.table.data != nullptr;
  const int64_t block_size = cache.shape[2];
  for (int64_t at = 0; at < given.q.shape[0]; ++at) {
    const int64_t length = given.lengths.empty() ? block_size : given.lengths[at];
    for (int64_t first = 0; first < length; first += block_size) {
      const int64_t block =
          is_paged ? given.table.data[at * given.table.stride + first / block_size] : at;
      lost.add_positions(cache, block, length - first);
    }
  }
}

void refuse_lost(const kernels::Attention& given, bool is_done) {
  check_memory([&](LostParts& lost) {
    if (!is_done) kernels::check_attention(given);
    lost.add(given.q);
    add_cache(given, given.k, lost);
    add_cache(given, given.v, lost);
    add_cache(given, given.k_groups, lost);
    add_cache(given, given.v_groups, lost);
    if (given.bias.data != nullptr) lost.add(given.bias);
    if (is_done) lost.add(given.out);
  });
}

// Copies the entries of a table that are read, and lets `given` have the copy: what is checked is
// what kernels use then, whatever another thread writes. Lengths that do not fit are checked later.
std::vector<int32_t> own_entries(kernels::Attention& given) {
  if (given.table.data == nullptr || given.k.shape.size() != 4) return {};
  const int64_t block = std::max<int64_t>(given.k.shape[2], 1);
  const auto used = [&](int64_t length) {
    const int64_t whole = std::max<int64_t>(length, 0) / block;
    return std::min(whole + (whole * block < length ? 1 : 0), given.table.columns);
  };
  int64_t most = 1;
  for (const int64_t length : given.lengths) most = std::max(most, used(length));
  const size_t rows = std::min(given.lengths.size(), static_cast<size_t>(given.q.shape[0]));
  std::vector<int32_t> entries(std::max<size_t>(rows, 1) * static_cast<size_t>(most));
  for (size_t i = 0; i < rows; ++i) {
    const auto row = static_cast<int64_t>(i);
    std::copy_n(given.table.data + row * given.table.stride, used(given.lengths[i]),
                entries.begin() + row * most);
  }
  given.table.data = entries.data();
  given.table.stride = most;
  return entries;
}

}  // namespace

void bind_attention(py::module_& module) {
  module.def("has_integer_codes", &has_integer_codes,
             "Whether attention and layers multiply 4-bit codes as integers here (isa "
             "\"avx512vnni\").");
  module.def(
      "run_attention",
      [](TensorView q, TensorView k, TensorView v, TensorView out, kernels::WorkerTeam& team,
         double scale, std::vector<int64_t> lengths, std::tuple<uintptr_t, int64_t, int64_t> table,
         std::pair<uintptr_t, int64_t> mask, int64_t window, uintptr_t log_sum_exp,
         std::optional<std::tuple<TensorView, TensorView, bool>> groups,
         std::vector<float> k_scales, std::vector<float> v_scales, int64_t queries, bool causal,
         double soft_cap, std::optional<TensorView> bias, std::vector<float> sinks,
         const std::string& isa, std::shared_ptr<os::Kernel> kernel) {
        const Unlocked released;
        kernels::Attention given;
        given.q = std::move(q);
        given.k = std::move(k);
        given.v = std::move(v);
        given.out = std::move(out);
        given.lengths = std::move(lengths);
        given.table = {reinterpret_cast<const int32_t*>(std::get<0>(table)), std::get<1>(table),
                       std::get<2>(table)};
        given.mask = reinterpret_cast<const uint8_t*>(mask.first);
        given.mask_columns = mask.second;
        given.window = window;
        given.scale = scale;
        if (groups) {
          std::tie(given.k_groups, given.v_groups, std::ignore) = *groups;
          given.group_scales = std::get<2>(*groups) ? kernels::GroupScales::kInverseLow
                                                    : kernels::GroupScales::kLowStep;
        }
        given.k_scales = std::move(k_scales);
        given.v_scales = std::move(v_scales);
        given.queries = queries;
        given.causal = causal;
        given.soft_cap = soft_cap;
        if (bias) given.bias = std::move(*bias);
        given.sinks = std::move(sinks);
        given.log_sum_exp = reinterpret_cast<float*>(log_sum_exp);
        const Isa used = take_isa(given, isa);
        const std::vector<int32_t> entries = own_entries(given);
        refuse_lost(given, false);
        settle(given.out);
        kernels::run_attention(given, team, used, kernel.get());
        refuse_lost(given, true);
      },
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("team"), py::kw_only(),
      py::arg("scale"), py::arg("lengths"), py::arg("table") = std::tuple(uintptr_t{0}, 0, 0),
      py::arg("mask") = std::pair(uintptr_t{0}, 0), py::arg("window") = 0,
      py::arg("log_sum_exp") = 0, py::arg("groups") = py::none(),
      py::arg("k_scales") = std::vector<float>(), py::arg("v_scales") = std::vector<float>(),
      py::arg("queries") = 1, py::arg("causal") = true, py::arg("soft_cap") = 0,
      py::arg("bias") = py::none(), py::arg("sinks") = std::vector<float>(), py::arg("isa") = "",
      py::arg("kernel") = py::none(),
      "Table: (address, columns, stride) of int32; mask: (address, columns) of bytes; 0: none. See "
      "kernels/attention.h.");
}

}  // namespace cxl_offload::bindings
