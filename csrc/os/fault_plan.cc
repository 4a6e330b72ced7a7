#include "os/fault_plan.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "core/error.h"

namespace cxl_offload::os {
namespace {

constexpr std::array<const char*, kOperationCount> kNames = {
    "map", "set_policy", "populate", "discard", "query", "move", "open_dax", "map_dax"};

size_t index_of(Operation operation) { return static_cast<size_t>(operation); }

// splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

void check(const Fault& fault) {
  const std::string what = std::string("fault of ") + operation_name(fault.operation);
  if (fault.call == 0) throw InvalidArgument(what + ": calls are counted from 1");
  const bool fails = fault.effect == FaultEffect::kRefuse || fault.effect == FaultEffect::kPartial;
  if (fails && fault.code <= 0) {
    throw InvalidArgument(what + ": " + std::to_string(fault.code) + " is no errno");
  }
  const bool places =
      fault.operation == Operation::kPopulate || fault.operation == Operation::kMove;
  if (fault.effect == FaultEffect::kPartial && !places) {
    throw InvalidArgument(what + ": only populate and move can be done in part");
  }
  if (fault.effect == FaultEffect::kStray && fault.operation != Operation::kPopulate) {
    throw InvalidArgument(what + ": only populate can put pages on a wrong node");
  }
  if (fault.effect == FaultEffect::kHidden && fault.operation != Operation::kQuery) {
    throw InvalidArgument(what + ": only a query can miss pages");
  }
  if (fault.effect == FaultEffect::kShared && fault.operation != Operation::kMove) {
    throw InvalidArgument(what + ": only a move is refused to shared pages");
  }
}

}  // namespace

const char* operation_name(Operation operation) { return kNames.at(index_of(operation)); }

Operation parse_operation(std::string_view name) {
  std::string known;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Operation>(i);
    known += (i > 0 ? ", " : "") + std::string(kNames[i]);
  }
  throw InvalidArgument("operation \"" + std::string(name) + "\" is unknown; operations are " +
                        known);
}

void FaultPlan::add(const Fault& fault) {
  check(fault);
  const std::lock_guard lock(mutex_);
  planned_.push_back(fault);
  planned_.back().call += calls_[index_of(fault.operation)];
}

void FaultPlan::add_random(const RandomFaults& faults) {
  if (!(faults.probability >= 0.0 && faults.probability <= 1.0) || faults.code <= 0) {
    throw InvalidArgument("random faults: probability " + std::to_string(faults.probability) +
                          " must be in 0..1, and the errno " + std::to_string(faults.code) +
                          " above zero");
  }
  const std::lock_guard lock(mutex_);
  random_ = faults;
}

void FaultPlan::clear() {
  const std::lock_guard lock(mutex_);
  planned_.clear();
  random_ = {};
}

uint64_t FaultPlan::calls(Operation operation) const {
  const std::lock_guard lock(mutex_);
  return calls_[index_of(operation)];
}

std::vector<Fault> FaultPlan::fired() const {
  const std::lock_guard lock(mutex_);
  return fired_;
}

std::optional<Fault> FaultPlan::begin_call(Operation operation) {
  const auto fault = count_call(operation);
  if (!fault || fault->effect != FaultEffect::kSignal) return fault;
  ::kill(::getpid(), SIGINT);  // threads of the core take no signals
  return std::nullopt;
}

std::optional<Fault> FaultPlan::count_call(Operation operation) {
  const std::lock_guard lock(mutex_);
  const uint64_t call = ++calls_[index_of(operation)];
  const auto planned = std::ranges::find_if(planned_, [&](const Fault& fault) {
    return fault.operation == operation && fault.call == call;
  });
  auto fault = random_fault(operation, call);
  if (planned != planned_.end()) {
    fault = *planned;
    planned_.erase(planned);
  }
  if (fault) fired_.push_back(*fault);
  return fault;
}

std::optional<Fault> FaultPlan::random_fault(Operation operation, uint64_t call) const {
  if (std::ranges::find(random_.operations, operation) == random_.operations.end()) return {};
  const uint64_t bits = mix(mix(random_.seed ^ index_of(operation)) ^ call);
  const double draw = static_cast<double>(bits >> 11) * 0x1.0p-53;
  if (draw >= random_.probability) return {};
  return Fault{operation, FaultEffect::kRefuse, call, random_.code, -1};
}

}  // namespace cxl_offload::os
