// Device-DAX devices of a simulated machine: sparse files in memory. Only what is written takes
// room. Like a real device, they keep their bytes from one owner to the next.
#ifndef CXL_OFFLOAD_OS_SIMULATED_DAX_H_
#define CXL_OFFLOAD_OS_SIMULATED_DAX_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "os/dax_device.h"
#include "os/fault_plan.h"

namespace cxl_offload::os {

struct SimulatedDax {
  std::string name = "dax0.0";
  uint64_t size_bytes = 0;
  size_t align_bytes = size_t{2} << 20;
  std::string mode = "devdax";  // or "system-ram", "unbound"
  int target_node = -1;
};

// Thread-safe. Must outlive the devices it opened.
class SimulatedDaxBus {
 public:
  // Throws InvalidArgument for devices that cannot be.
  SimulatedDaxBus(const std::vector<SimulatedDax>& devices, FaultPlan& faults);
  ~SimulatedDaxBus();
  SimulatedDaxBus(const SimulatedDaxBus&) = delete;
  SimulatedDaxBus& operator=(const SimulatedDaxBus&) = delete;

  // Does what Kernel::open_dax says.
  std::unique_ptr<DaxDevice> open(const std::string& name);
  // Bytes of the device that are mapped now.
  uint64_t mapped_bytes(const std::string& name) const;

 private:
  class Device;
  struct Slot {
    SimulatedDax what;
    int file = -1;
    std::atomic<bool> claimed = false;
    std::atomic<uint64_t> mapped_bytes = 0;
  };

  Slot& find(const std::string& name, const std::string& call) const;

  FaultPlan& faults_;
  mutable std::map<std::string, Slot> slots_;  // never changes but for the slots' atomics
};

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_SIMULATED_DAX_H_
