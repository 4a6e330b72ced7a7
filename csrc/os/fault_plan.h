// Faults on demand: which call of the kernel seam fails, and how. A test first runs its scenario
// without faults, reads how often every operation was called, and then fails each of these calls
// once.
#ifndef CXL_OFFLOAD_OS_FAULT_PLAN_H_
#define CXL_OFFLOAD_OS_FAULT_PLAN_H_

#include <array>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "os/node_set.h"

namespace cxl_offload::os {

enum class Operation { kMap, kSetPolicy, kPopulate, kDiscard, kQuery, kMove, kOpenDax, kMapDax };
inline constexpr size_t kOperationCount = 8;

// "map", "set_policy", "populate", "discard", "query", "move", "open_dax",
// "map_dax".
const char* operation_name(Operation operation);
// Throws InvalidArgument with the known names.
Operation parse_operation(std::string_view name);

enum class FaultEffect {
  kRefuse,   // nothing is done, the call fails
  kPartial,  // populate, move: the first half of the pages is done, then the call fails
  kStray,    // populate: succeeds, with every page on a wrong node
  kHidden,   // query: answers that no page is there, as for pages that are on the move
  kShared,   // move: no page moves, as if a forked child shared them
  kSignal,   // the process is sent SIGINT, as by Ctrl-C, and the call goes on
};

struct Fault {
  Operation operation = Operation::kPopulate;
  FaultEffect effect = FaultEffect::kRefuse;
  uint64_t call = 1;  // which call: 1 is the next one after the fault was added
  int code = ENOMEM;  // errno of the failure; for kRefuse and kPartial
  NodeId stray = -1;  // kStray: where pages go; -1 is the nearest other node with room
};

// Every operation in `operations` fails with `probability`, decided by seed, operation and number
// of the call alone, whatever the threads do.
struct RandomFaults {
  uint64_t seed = 0;
  double probability = 0.0;
  std::vector<Operation> operations;
  int code = ENOMEM;
};

// Thread-safe.
class FaultPlan {
 public:
  // Throws InvalidArgument for a fault that could never happen.
  void add(const Fault& fault);
  // Replaces the earlier random faults.
  void add_random(const RandomFaults& faults);
  // Forgets all faults; the counts stay.
  void clear();

  // Calls of the operation so far, failed ones included.
  uint64_t calls(Operation operation) const;
  // The faults that have happened, in order. `call` is the number of the call since the kernel was
  // made.
  std::vector<Fault> fired() const;

  // The kernel calls this. It counts a call, and says which fault the call has.
  std::optional<Fault> begin_call(Operation operation);

 private:
  std::optional<Fault> count_call(Operation operation);
  std::optional<Fault> random_fault(Operation operation, uint64_t call) const;

  mutable std::mutex mutex_;
  std::vector<Fault> planned_;  // with absolute call numbers
  RandomFaults random_;
  std::array<uint64_t, kOperationCount> calls_{};
  std::vector<Fault> fired_;
};

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_FAULT_PLAN_H_
