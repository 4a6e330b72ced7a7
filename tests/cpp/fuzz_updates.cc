// What libFuzzer drives, and test_fuzz_updates.cc replays: optimizer updates of any rule, types,
// offsets, lengths, cuts, teams and instruction sets against the scalar loop on one thread, with
// states of every width and roundings at random.
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "core/error.h"
#include "fuzz_arrays.h"
#include "fuzz_input.h"
#include "kernels/update.h"

namespace cxl_offload::kernels {
namespace {

const std::vector<Dtype> kWritten = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};
const std::vector<Dtype> kStates = {Dtype::kFloat32, Dtype::kBfloat16};
const std::vector<Dtype> kNoisyStates = {Dtype::kUint8, Dtype::kUint8, Dtype::kBfloat16};
const std::vector<Dtype> kNoisyParams = {Dtype::kFloat32, Dtype::kFloat32, Dtype::kBfloat16};
const std::vector<Dtype> kCopies = {Dtype::kBfloat16, Dtype::kFloat16};

UpdateRule any_rule(Input& input) {
  // The greatest of all still make constants of a step that float32 holds.
  const std::vector<double> rates = {0, 1e-3, 0.1, 3.5, 1e-30, 1e22};
  const std::vector<double> betas = {0, 0.9, 0.999, 0.5, std::nextafter(1.0, 0.0)};
  const std::vector<double> decays = {0, 0, 0.01, 2, 1e10};
  const std::vector<double> scales = {1, 1, 0.5, 1.0 / 65536, -1, 0, 1e30};
  const std::vector<int64_t> steps = {1, 2, 1000, int64_t{1} << 40};
  const size_t kind = input.below(4);
  if (kind == 1) {
    return Adagrad{input.any_of(steps), input.any_of(rates),  input.any_of(rates),
                   input.any_of(rates), input.any_of(decays), input.any_of(scales)};
  }
  if (kind == 2) {
    return Lion{input.any_of(rates), input.any_of(betas), input.any_of(betas), input.any_of(decays),
                input.any_of(scales)};
  }
  return Adam{input.any_of(steps), input.any_of(rates), input.any_of(betas),
              input.any_of(betas), input.any_of(rates), input.any_of(decays),
              input.below(2) == 0, input.below(2) == 0, input.any_of(scales)};
}

// Below and above every threshold: a block of the loop or of 8-bit states, a page, what one thread
// does alone, a chunk, and what makes a copy go past the caches.
size_t any_length(Input& input) {
  const size_t kind = input.below(64);
  const size_t more = input.byte();
  if (kind < 18) return more % 100;
  if (kind < 24) return 128 * (1 + more % 9) - 2 + more / 9 % 5;
  if (kind < 40) return more * 37;
  if (kind < 56) return (size_t{16} << 10) - 128 + more;
  if (kind < 63) return (size_t{16} << 10) * (1 + more % 20) + more;
  return (size_t{2} << 20) - 64 + more;
}

size_t any_offset(Input& input) {
  const size_t kind = input.below(8);
  if (kind < 2) return 0;
  if (kind < 4) return 16 * input.below(64);
  return kind < 7 ? input.below(64) : input.byte() * 9;
}

// One parameter with all that belongs to it.
struct Tensors {
  Tensors(Input& input, UpdateRule rule) : rule(rule) {
    const size_t length = any_length(input);
    const size_t adam = state_count(rule) == 2;
    Numbers numbers(input.byte());
    const auto filling = static_cast<Filling>(input.below(4));
    const auto add = [&](Dtype dtype, bool positive) {
      arrays.emplace_back(dtype, length, any_offset(input));
      arrays.back().fill(filling, positive, numbers);
    };
    if (!std::holds_alternative<Adagrad>(rule) && input.below(2) == 0) {
      rounding = Rounding{input.byte() * uint64_t{0x123456789abcdef1},
                          static_cast<int64_t>(1 + input.byte())};
    }
    if (rounding) {
      add(input.any_of(kNoisyParams), false);
    } else {
      add(input.below(4) == 0 ? input.any_of(kWritten) : Dtype::kFloat32, false);
    }
    add(input.any_of(kWritten), false);
    const bool float_states =
        rounding && arrays[0].dtype() == Dtype::kBfloat16 && input.below(4) == 0;
    const Dtype state =
        float_states ? Dtype::kFloat32 : input.any_of(rounding ? kNoisyStates : kStates);
    add(state, !adam);
    if (adam) add(state, true);
    if (state == Dtype::kUint8) add_scales(input, length, numbers);
    copied = arrays[0].dtype() == Dtype::kFloat32 && input.below(3) != 0;
    if (copied) add(input.any_of(kCopies), false);
  }
  // Any code is one; any scale too, most of them near 1.
  void add_scales(Input& input, size_t length, Numbers& numbers) {
    scales_at = arrays.size();
    const bool any = input.below(4) == 0;
    for (size_t i = 0; i < state_count(rule); ++i) {
      arrays.emplace_back(Dtype::kUint8, (length + kCodedElements - 1) / kCodedElements,
                          any_offset(input));
      for (size_t at = 0; at < arrays.back().bytes(); ++at) {
        const auto byte = static_cast<uint8_t>(numbers.next() >> 56);
        arrays.back().data()[at] = static_cast<std::byte>(any ? byte : 110 + byte % 24);
      }
      for (size_t at = 0; at < length; ++at) {
        arrays[2 + i].data()[at] = static_cast<std::byte>(numbers.next() >> 56);
      }
    }
  }
  // The same numbers, all of them at the beginning of a page.
  Tensors(const Tensors& other, size_t offset)
      : rule(other.rule),
        rounding(other.rounding),
        scales_at(other.scales_at),
        copied(other.copied) {
    for (const GuardedArray& each : other.arrays) arrays.emplace_back(each, offset);
  }

  Update update() {
    Update made{rule, arrays[0].view(), arrays[1].view(), {arrays[2].view()}, {}};
    if (state_count(rule) == 2) made.states.push_back(arrays[3].view());
    for (size_t i = 0; scales_at > 0 && i < state_count(rule); ++i) {
      made.scales.push_back(arrays[scales_at + i].view());
    }
    if (copied) made.copy = arrays.back().view();
    made.rounding = rounding;
    return made;
  }

  UpdateRule rule;
  std::optional<Rounding> rounding;
  size_t scales_at = 0;  // among the arrays; 0: none
  bool copied = false;
  std::vector<GuardedArray> arrays;  // parameter, gradient, states, scales, copy
};

template <class T>
bool same_number(T a, T b) {
  return a.bits == b.bits || (std::isnan(to_float(a)) && std::isnan(to_float(b)));
}
bool same_number(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

template <class T>
void require_same_numbers(const GuardedArray& a, const GuardedArray& b, const std::string& what) {
  for (size_t i = 0; i < a.count(); ++i) {
    T left;
    T right;
    std::memcpy(&left, a.data() + i * sizeof(T), sizeof(T));
    std::memcpy(&right, b.data() + i * sizeof(T), sizeof(T));
    require(same_number(left, right),
            what + ", element " + std::to_string(i) + " of " + std::to_string(a.count()) + ": " +
                std::to_string(to_float(left)) + " against " + std::to_string(to_float(right)));
  }
}

// Bit by bit, but for which NaN a NaN is.
void require_same(const GuardedArray& a, const GuardedArray& b, const std::string& what) {
  if (a.same_bytes(b)) return;
  if (a.dtype() == Dtype::kFloat32) return require_same_numbers<float>(a, b, what);
  if (a.dtype() == Dtype::kBfloat16) return require_same_numbers<Bf16>(a, b, what);
  require(a.dtype() != Dtype::kUint8, what + ": codes or scales differ");
  return require_same_numbers<F16>(a, b, what);
}

std::vector<Update> updates_of(std::vector<Tensors>& all) {
  std::vector<Update> updates;
  for (Tensors& each : all) updates.push_back(each.update());
  return updates;
}

// Makes one of them unfit.
void spoil(Input& input, std::vector<Update>& updates) {
  Update& update = updates[input.below(updates.size())];
  const size_t how = input.below(14);
  const double bad = input.any_of<double>(
      {-1, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()});
  if (how == 0) update.states[0].dtype = Dtype::kFloat16;
  if (how == 1) update.grad.shape[0] += 1;
  if (how == 2) update.param.shape[0] = 2, update.param.strides[0] = 3;
  if (how == 3) update.states.pop_back();
  if (how == 4) update.states.push_back(update.states[0]);
  if (how == 5) update.grad.dtype = Dtype::kUint8;
  if (how == 6) update.copy = update.param;
  if (how == 7) std::visit([&](auto& rule) { rule.lr = bad; }, update.rule);
  if (how == 8) std::visit([&](auto& rule) { rule.weight_decay = bad; }, update.rule);
  if (how == 9) update.states[0].dtype = Dtype::kFloat8E5m2;
  if (how == 10) update.rounding = Rounding{1, 0};
  if (how == 11) update.scales.push_back(update.grad);
  if (how == 12) update.states[0].dtype = Dtype::kUint8, update.scales.clear();
  if (how == 13) update.states[0].dtype = Dtype::kUint8, update.rounding.reset();
}

void require_refused(const std::vector<Update>& updates, std::vector<Tensors>& all, Isa isa) {
  std::vector<Tensors> before;
  for (const Tensors& each : all) before.emplace_back(each, 0);
  bool refused = false;
  try {
    run_updates(updates, team_of({1}), {isa});
  } catch (const InvalidArgument&) {
    refused = true;
  }
  require(refused, "updates that do not fit were run");
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t k = 0; k < all[i].arrays.size(); ++k) {
      require(all[i].arrays[k].same_bytes(before[i].arrays[k]), "refused, and yet written");
    }
  }
}

void fuzz_updates(Input& input) {
  const FlushedDenormals mode(input.one_in(8));
  const Isa isa = input.any_of(supported_isas());
  WorkerTeam& team = any_team(input);
  const bool unfit = input.one_in(16);
  const size_t count = input.below(8) == 0 ? 1 + input.below(4) : 1;
  std::vector<Tensors> all;
  std::vector<Tensors> expected;
  for (size_t i = 0; i < count; ++i) {
    all.emplace_back(input, any_rule(input));
    expected.emplace_back(all.back(), 0);
  }
  std::vector<Update> updates = updates_of(all);
  if (unfit) {
    spoil(input, updates);
    return require_refused(updates, all, isa);
  }
  for (Update& update : updates_of(expected)) run_updates({update}, team_of({1}), {Isa::kScalar});
  run_updates(updates, team, {isa});
  for (size_t i = 0; i < count; ++i) {
    for (size_t k = 0; k < all[i].arrays.size(); ++k) {
      require_same(all[i].arrays[k], expected[i].arrays[k],
                   "array " + std::to_string(k) + " with " + isa_name(isa));
      require(all[i].arrays[k].guard_is_whole(), "bytes before an array were written");
    }
  }
}

}  // namespace
}  // namespace cxl_offload::kernels

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  cxl_offload::Input input(data, size);
  cxl_offload::kernels::fuzz_updates(input);
  return 0;
}
