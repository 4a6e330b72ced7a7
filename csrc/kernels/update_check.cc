#include "kernels/update_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "core/error.h"

namespace cxl_offload::kernels {
namespace {

std::string text(double value) {
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "%g", value);
  return digits.data();
}

[[noreturn]] void refuse(const std::string& why) { throw InvalidArgument("update: " + why); }

[[noreturn]] void refuse(const char* what, double value, const std::string& why) {
  refuse(what + (" is " + text(value)) + "; " + why);
}

// Checks of settings run for every parameter of a step, so they make no text unless one is wrong.
void require(bool good, const char* what, double value, const char* range) {
  if (!good) refuse(what, value, std::string("it must be ") + range);
}

constexpr double kLargest = std::numeric_limits<float>::max();
constexpr double kLeast = std::numeric_limits<float>::denorm_min();

void check_not_negative(const char* what, double value) {
  check_held(what, value);
  require(std::isfinite(value) && value >= 0, what, value, "finite and not negative");
}

// It is added to what divides, which may be 0.
void check_eps(double value) {
  check_not_negative("eps", value);
  if (value > 0 && value <= kLeast / 2) {
    refuse("eps", value, "float32 rounds it to 0: give 0, or 1e-38 or more");
  }
}

void check_beta(const char* what, double value) {
  require(value >= 0 && value < 1, what, value, "at least 0 and below 1");
}

void check_step(int64_t step) {
  require(step >= 1, "step", static_cast<double>(step), "at least 1: steps count from 1");
}

void check_settings(const Adam& rule) {
  check_step(rule.step);
  check_not_negative("lr", rule.lr);
  check_beta("beta1", rule.beta1);
  check_beta("beta2", rule.beta2);
  check_eps(rule.eps);
  check_not_negative("weight_decay", rule.weight_decay);
  if (rule.bias_correction) {
    const double part = 1 - std::pow(rule.beta1, static_cast<double>(rule.step));
    check_held("lr / (1 - beta1 ** step)", rule.lr / part);
  }
  if (rule.decoupled) check_held("lr * weight_decay", rule.lr * rule.weight_decay);
}

void check_settings(const Adagrad& rule) {
  check_step(rule.step);
  check_not_negative("lr", rule.lr);
  check_not_negative("lr_decay", rule.lr_decay);
  check_eps(rule.eps);
  check_not_negative("weight_decay", rule.weight_decay);
}

void check_settings(const Lion& rule) {
  check_not_negative("lr", rule.lr);
  check_beta("beta1", rule.beta1);
  check_beta("beta2", rule.beta2);
  check_not_negative("weight_decay", rule.weight_decay);
  check_held("lr * weight_decay", rule.lr * rule.weight_decay);
}

void check_view(const TensorView& view, const std::string& name, size_t numel) {
  if (!is_written(view.dtype)) {
    throw InvalidArgument("update: " + name + " is " + dtype_name(view.dtype) +
                          "; use float32, bfloat16 or float16");
  }
  if (!view.is_contiguous()) {
    throw InvalidArgument("update: " + name + " is not contiguous; pass " + name +
                          ".contiguous(), or the tensor that it is a view of");
  }
  if (view.numel() != numel) {
    throw InvalidArgument("update: " + name + " has " + std::to_string(view.numel()) +
                          " elements and the parameter " + std::to_string(numel));
  }
}

// Checks states of 8 bits.
void check_codes(const Update& update) {
  const size_t numel = update.param.numel();
  const size_t blocks = (numel + kCodedElements - 1) / kCodedElements;
  if (update.scales.size() != update.states.size()) {
    refuse(std::to_string(update.scales.size()) + " scales are given for " +
           std::to_string(update.states.size()) + " states of 8 bits; give one for each");
  }
  if (!update.rounding) refuse("states of 8 bits are rounded at random; give a seed and the step");
  for (const std::vector<TensorView>* views : {&update.states, &update.scales}) {
    for (const TensorView& view : *views) {
      const size_t wanted = views == &update.states ? numel : blocks;
      if (view.dtype != Dtype::kUint8 || !view.is_contiguous() || view.numel() != wanted) {
        refuse("states of 8 bits, or their scales, are " + dtype_name(view.dtype) + " with " +
               std::to_string(view.numel()) + " elements; they must be contiguous uint8 with " +
               std::to_string(wanted));
      }
    }
  }
}

void check_rounding(const Update& update) {
  const bool coded = !update.states.empty() && update.states[0].dtype == Dtype::kUint8;
  if (!coded && !update.scales.empty())
    refuse("scales are given for states that are not of 8 bits");
  if (!update.rounding) return;
  if (std::holds_alternative<Adagrad>(update.rule)) {
    refuse("Adagrad's sum is not rounded at random; use Adam or Lion");
  }
  check_step(update.rounding->step);
  const Dtype param = update.param.dtype;
  const bool narrow = coded || update.states[0].dtype == Dtype::kBfloat16;
  if (param == Dtype::kFloat16) {
    refuse(
        "parameters of float16 are never rounded at random, so they can have neither states of 8 "
        "bits nor a rounding seed; make them bfloat16, or their states float32");
  }
  if (!narrow && param != Dtype::kBfloat16) {
    refuse("there is no rounding at random of parameters of " + dtype_name(param) +
           " with states of " + dtype_name(update.states[0].dtype) +
           "; it is for states of bfloat16 or 8 bits and parameters of bfloat16 or float32");
  }
}

void check_states(const Update& update) {
  if (update.states.size() != state_count(update.rule)) {
    throw InvalidArgument("update: " + std::to_string(update.states.size()) +
                          " states are given, the rule has " +
                          std::to_string(state_count(update.rule)));
  }
  check_rounding(update);
  if (update.states[0].dtype == Dtype::kUint8) return check_codes(update);
  for (const TensorView& state : update.states) {
    check_view(state, "a state", update.param.numel());
    if (state.dtype == Dtype::kFloat16) {
      throw InvalidArgument(
          "update: a state is float16, whose range is too short for it; use float32 or bfloat16");
    }
    if (state.dtype != update.states[0].dtype) {
      throw InvalidArgument("update: one state is " + dtype_name(update.states[0].dtype) +
                            " and another " + dtype_name(state.dtype) + "; make them alike");
    }
  }
}

void check_copy(const Update& update) {
  if (!update.copy) return;
  check_view(*update.copy, "the low-precision copy", update.param.numel());
  if (update.copy->dtype == Dtype::kFloat32 || update.param.dtype != Dtype::kFloat32) {
    throw InvalidArgument("update: a low-precision copy of " + dtype_name(update.copy->dtype) +
                          " beside parameters of " + dtype_name(update.param.dtype) +
                          "; it is bfloat16 or float16 beside float32");
  }
}

struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool written = false;
  const char* name = "";
};

void add_range(const TensorView& view, bool written, const char* name, std::vector<Range>& ranges) {
  if (view.bytes() == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(view.data);
  ranges.push_back({begin, begin + view.bytes(), written, name});
}

// Goes over the ranges in the order of their begins. All that matters of the ranges before the
// current one is where the furthest of them ends, and where the furthest written one ends.
void check_overlaps(std::vector<Range> ranges) {
  std::ranges::sort(ranges, {}, &Range::begin);
  const Range* furthest = nullptr;
  const Range* furthest_written = nullptr;
  for (const Range& range : ranges) {
    const Range* other = range.written ? furthest : furthest_written;
    if (other != nullptr && other->end > range.begin) {
      throw InvalidArgument(std::string("update: ") + range.name + " overlaps with " + other->name +
                            " in memory; give each its own storage");
    }
    if (furthest == nullptr || range.end > furthest->end) furthest = &range;
    if (range.written && (furthest_written == nullptr || range.end > furthest_written->end)) {
      furthest_written = &range;
    }
  }
}

}  // namespace

void check_held(const char* what, double value) {
  if (!std::isfinite(value) || std::abs(value) <= kLargest) return;
  std::array<char, 32> largest{};
  std::snprintf(largest.data(), largest.size(), "%.4g", kLargest);
  refuse(what, value,
         std::string("steps are computed in float32, which holds up to ") + largest.data());
}

void check_rule(const UpdateRule& rule) {
  std::visit(
      [](const auto& settings) {
        check_settings(settings);
        check_held("grad_scale", settings.grad_scale);
        require(std::isfinite(settings.grad_scale), "grad_scale", settings.grad_scale, "finite");
      },
      rule);
}

void check_updates(const std::vector<Update>& updates, std::vector<CountRange> counts) {
  std::vector<Range> ranges;
  ranges.reserve(updates.size() * 7 + counts.size());
  for (const Update& update : updates) {
    check_rule(update.rule);
    check_view(update.param, "the parameter", update.param.numel());
    check_view(update.grad, "the gradient", update.param.numel());
    check_states(update);
    check_copy(update);
    add_range(update.param, true, "the parameter", ranges);
    add_range(update.grad, false, "a gradient", ranges);
    for (const TensorView& state : update.states) add_range(state, true, "a state", ranges);
    for (const TensorView& each : update.scales) add_range(each, true, "scales of a state", ranges);
    if (update.copy) add_range(*update.copy, true, "a low-precision copy", ranges);
  }
  std::ranges::sort(counts);
  counts.erase(std::ranges::unique(counts).begin(), counts.end());
  for (const CountRange& each : counts) {
    ranges.push_back({each.begin, each.end, true, "the count of a step"});
  }
  check_overlaps(std::move(ranges));
}

}  // namespace cxl_offload::kernels
