#include "kernels/linear.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>

#include "bindings/bind.h"
#include "bindings/lost.h"
#include "core/error.h"
#include "kernels/linear_check.h"
#include "memory/block_copies.h"

namespace cxl_offload::bindings {

namespace py = pybind11;

using kernels::GroupScales;

namespace {

using kernels::Bf16Products;

// The names by which linear layers are asked to multiply numbers of bfloat16, and what a processor
// has not where it has none of them.
struct NamedProducts {
  const char* name;
  Bf16Products products;
  const char* lacking;
};
constexpr std::array kNamedProducts = {
    NamedProducts{"avx512bf16", Bf16Products::kVectors, "AVX512-BF16"},
    NamedProducts{"avx512vbmi", Bf16Products::kWidened, "AVX512-VBMI"},
    NamedProducts{"amxbf16", Bf16Products::kTiles, "AMX-BF16, or the system does not give it"},
};

// Returns what the named instruction set allows. An empty name allows whatever is best.
Bf16Products products_of(const std::string& isa) {
  if (isa.empty()) return Bf16Products::kBest;
  for (const NamedProducts& each : kNamedProducts) {
    if (isa != each.name) continue;
    if (kernels::has_bf16_products(each.products)) return each.products;
    throw InvalidArgument("instruction set '" + isa + "': this processor has no " + each.lacking);
  }
  return Bf16Products::kNone;
}

// Whether codes are multiplied as integers, which the name asks for.
bool integers_of(const std::string& isa) {
  if (isa != "avx512vnni") return false;
  if (has_integer_codes()) return true;
  throw InvalidArgument("instruction set 'avx512vnni': this processor has no AVX512-VNNI");
}

// Returns the names of those that this processor has.
std::vector<std::string> names_of_products() {
  std::vector<std::string> names;
  for (const NamedProducts& each : kNamedProducts) {
    if (kernels::has_bf16_products(each.products)) names.emplace_back(each.name);
  }
  return names;
}

// The names besides those of instruction sets that `isa` may have here, for a message.
std::string product_names() {
  std::string names;
  for (const std::string& name : names_of_products()) names += ", " + name;
  return names + (has_integer_codes() ? ", avx512vnni" : "");
}

TensorView at(TensorView view, const std::byte* data) {
  view.data = const_cast<std::byte*>(data);
  return view;
}

// The instruction set whose loops are taken for a layer of which that is asked, or the best one.
Isa isa_of(const kernels::Linear& given, const std::string& isa) {
  const bool best = given.integers || given.bf16_products != Bf16Products::kNone;
  return best ? best_isa() : parse_isa(isa, product_names());
}

// Keeps the copies of weights that are read alive.
using Copies = std::vector<std::shared_ptr<memory::PlacedBlock>>;

// Returns where the threads of a group read the bytes that begin at `data`.
const std::byte* near_of(const std::byte* data, const memory::PlacedBlock* block,
                         const kernels::WorkerGroup& group) {
  if (block == nullptr) return data;
  return block->near_copy(data,
                          group.node < 0 ? block->session().kernel().local_node() : group.node);
}

// If there are several copies, each group of the team reads the one near it. A group that is bound
// to no node runs near the caller.
Copies find_copies(kernels::Linear& given, const kernels::WorkerTeam& team) {
  Copies held{memory::find_first_copy(given.weight.data),
              memory::find_first_copy(given.groups.data)};
  const auto& [weight, groups] = std::tie(held[0], held[1]);
  if (!weight && !groups) return held;
  for (const kernels::WorkerGroup& group : team.groups()) {
    given.near.push_back({near_of(given.weight.data, weight.get(), group),
                          near_of(given.groups.data, groups.get(), group)});
  }
  return held;
}

void refuse_lost(const kernels::Linear& given, bool is_done) {
  check_memory([&](LostParts& lost) {
    if (!is_done) kernels::check_linear(given);
    for (const kernels::NearCopy& copy : given.near) {
      lost.add(at(given.weight, copy.weight));
      if (copy.groups != nullptr) lost.add(at(given.groups, copy.groups));
    }
    for (const TensorView* view :
         {&given.x, &given.weight, &given.bias, &given.scale, &given.groups}) {
      if (view->data != nullptr) lost.add(*view);
    }
    if (is_done) lost.add(given.y);
  });
}

// Computes a layer, once its tensors and what it may multiply with are known.
void compute(kernels::Linear& given, kernels::WorkerTeam& team, Isa isa, const os::Kernel* kernel) {
  const Copies held = find_copies(given, team);
  refuse_lost(given, false);
  settle(given.y);
  kernels::run_linear(given, team, isa, kernel);
  refuse_lost(given, true);
}

// A weight and its bias, converted from Python once for many calls.
struct PreparedLinear {
  TensorView weight;
  TensorView bias;

  // `x` and `y` are contiguous rows of one type.
  void run(uintptr_t x, size_t rows, Dtype dtype, uintptr_t y, kernels::WorkerTeam& team,
           const os::Kernel* kernel) const {
    const auto rows_of = [&](uintptr_t address, int64_t width) {
      return make_view(address, dtype, {static_cast<int64_t>(rows), width}, {width, 1});
    };
    kernels::Linear given;
    given.x = rows_of(x, weight.shape.at(1));
    given.y = rows_of(y, weight.shape.at(0));
    given.weight = weight;
    given.bias = bias;
    given.bf16_products = Bf16Products::kBest;
    compute(given, team, best_isa(), kernel);
  }
};

}  // namespace

void bind_linear(py::module_& module) {
  py::enum_<GroupScales>(module, "GroupScales")
      .value("low_step", GroupScales::kLowStep)
      .value("inverse_low", GroupScales::kInverseLow)
      .value("zero_step", GroupScales::kZeroStep);
  module.def("bf16_products", names_of_products,
             "The values of `isa` by which linear layers multiply numbers of bfloat16 here.");
  module.def("has_fast_bf16_products", kernels::has_fast_bf16_products,
             "Whether vectors of bfloat16 (\"avx512bf16\") are multiplied unasked: the instruction "
             "takes no longer than those for as many products of float32.");
  py::class_<PreparedLinear>(module, "PreparedLinear")
      .def(py::init([](TensorView weight, std::optional<TensorView> bias) {
             if (weight.shape.size() != 2) throw InvalidArgument("weight must be (outputs, width)");
             return PreparedLinear{std::move(weight), bias ? std::move(*bias) : TensorView{}};
           }),
           py::arg("weight"), py::arg("bias") = py::none(),
           "Views of a weight and its bias, whose memory the caller keeps.")
      .def(
          "run",
          [](const PreparedLinear& self, uintptr_t x, size_t rows, const std::string& dtype,
             uintptr_t y, kernels::WorkerTeam& team, std::shared_ptr<os::Kernel> kernel) {
            const Unlocked released;
            self.run(x, rows, parse_dtype(dtype), y, team, kernel.get());
          },
          py::arg("x"), py::arg("rows"), py::arg("dtype"), py::arg("y"), py::arg("team"),
          py::arg("kernel") = py::none(),
          "As run_linear(), of contiguous rows of one type at the addresses x and y.");
  module.def(
      "run_linear",
      [](TensorView x, TensorView weight, TensorView y, kernels::WorkerTeam& team,
         std::optional<TensorView> bias, std::optional<TensorView> scale,
         std::optional<std::pair<TensorView, GroupScales>> groups, const std::string& isa,
         std::shared_ptr<os::Kernel> kernel) {
        const Unlocked released;
        kernels::Linear given;
        given.x = std::move(x);
        given.weight = std::move(weight);
        given.y = std::move(y);
        if (bias) given.bias = std::move(*bias);
        if (scale) given.scale = std::move(*scale);
        if (groups) std::tie(given.groups, given.group_scales) = std::move(*groups);
        given.bf16_products = products_of(isa);
        given.integers = integers_of(isa);
        compute(given, team, isa_of(given, isa), kernel.get());
      },
      py::arg("x"), py::arg("weight"), py::arg("y"), py::arg("team"), py::kw_only(),
      py::arg("bias") = py::none(), py::arg("scale") = py::none(), py::arg("groups") = py::none(),
      py::arg("isa") = "", py::arg("kernel") = py::none(), "See kernels/linear.h.");
  module.def(
      "linear_products_per_s",
      [](TensorView x, TensorView weight, kernels::WorkerTeam& team,
         std::optional<std::pair<TensorView, GroupScales>> groups, const std::string& isa) {
        const Unlocked released;
        kernels::Linear given;
        given.x = std::move(x);
        given.weight = std::move(weight);
        if (groups) std::tie(given.groups, given.group_scales) = std::move(*groups);
        given.bf16_products = products_of(isa);
        given.integers = integers_of(isa);
        return kernels::linear_products_per_s(given, team, isa_of(given, isa));
      },
      py::arg("x"), py::arg("weight"), py::arg("team"), py::kw_only(),
      py::arg("groups") = py::none(), py::arg("isa") = "", "See kernels/linear.h.");
}

}  // namespace cxl_offload::bindings
