// Optimizer updates in one pass over memory. Every element of the parameters, gradients and states
// is read once, and those that change are written once, whatever their types are. Nothing else is
// stored.
#ifndef CXL_OFFLOAD_KERNELS_UPDATE_H_
#define CXL_OFFLOAD_KERNELS_UPDATE_H_

#include <compare>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "core/cpu_features.h"
#include "core/tensor_view.h"
#include "kernels/worker_team.h"
#include "os/kernel.h"

namespace cxl_offload::kernels {

// Every gradient is multiplied by grad_scale before anything else: the inverse of the loss scale
// times the clip coefficient. weight_decay adds to the gradient (L2), or shrinks the parameter by
// lr * weight_decay when it is decoupled.

// Kingma and Ba, Adam: A Method for Stochastic Optimization; Loshchilov and Hutter, Decoupled
// Weight Decay Regularization. States: exp_avg, exp_avg_sq.
struct Adam {
  int64_t step = 1;  // the number of this update; the first is 1
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  bool decoupled = true;
  bool bias_correction = true;
  double grad_scale = 1;
};

// Duchi et al., Adaptive Subgradient Methods. State: sum of squares.
struct Adagrad {
  int64_t step = 1;
  double lr = 0;
  double lr_decay = 0;
  double eps = 0;
  double weight_decay = 0;  // L2
  double grad_scale = 1;
};

// Chen et al., Symbolic Discovery of Optimization Algorithms. State: exp_avg.
struct Lion {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double weight_decay = 0;  // decoupled
  double grad_scale = 1;
};

using UpdateRule = std::variant<Adam, Adagrad, Lion>;
// The number of states of one parameter: 2 for Adam, 1 for the others.
size_t state_count(const UpdateRule& rule);

// Elements of a block of 8-bit states. A block shares one scale.
inline constexpr size_t kCodedElements = 128;

// Says that states are rounded at random, and parameters of bfloat16 too. The chances of rounding
// up and down are such that the mean is right. The random bits depend on the seed, the step and the
// number of the element alone.
struct Rounding {
  uint64_t seed = 0;
  int64_t step = 1;
};

// One parameter. The views are contiguous and have the same number of elements. Parameters and
// gradients may be of any type. States are of float32 or bfloat16, all of a rule alike. The copy is
// of bfloat16 or float16 beside float32 parameters, and receives the updated parameters.
//
// States of Adam and Lion may also be codes of 8 bits (uint8, see docs/adam.md). Each such state
// has one scale (uint8) for every block of kCodedElements; the last block may be shorter. Codes
// need a `rounding`. Without codes a `rounding` is refused if nothing would be rounded, or if the
// parameters are float16.
struct Update {
  UpdateRule rule;
  TensorView param;
  TensorView grad;
  std::vector<TensorView> states;
  std::optional<TensorView> copy;
  std::vector<TensorView> scales = {};  // as many as states, or none
  std::optional<Rounding> rounding = {};
};

// Where the caller counts a step when everything is written.
struct CountRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  auto operator<=>(const CountRange&) const = default;
};

struct UpdateOptions {
  Isa isa = Isa::kScalar;
  // When the team has several groups, this kernel says where the pages are, so that each group
  // works on the bytes of its own node first. With null the work is taken in order.
  const os::Kernel* kernel = nullptr;
  // Updates may share one, but no view may be there.
  std::vector<CountRange> counts = {};
};

// Throws InvalidArgument, before anything is written, for views that do not fit each other, a
// setting outside of its range, or views that share bytes of which one is written. Every bit of the
// result is the same for any team and any instruction set.
void run_updates(const std::vector<Update>& updates, WorkerTeam& team,
                 const UpdateOptions& options);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_UPDATE_H_
