#include "os/simulated_dax.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace cxl_offload::os {
namespace {

void throw_fault(FaultPlan& faults, Operation operation, const std::string& name) {
  const auto fault = faults.begin_call(operation);
  if (!fault) return;
  const std::string what = std::string(operation_name(operation)) + " " + name +
                           " (fault injected into call " + std::to_string(fault->call) +
                           "): " + std::strerror(fault->code);
  if (fault->code == ENOMEM) throw OutOfMemory(what);
  throw SystemError(fault->code, what);
}

}  // namespace

class SimulatedDaxBus::Device final : public DaxDevice {
 public:
  Device(Slot& slot, FaultPlan& faults) : slot_(slot), faults_(faults) {}
  ~Device() override { slot_.claimed = false; }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& name() const override { return slot_.what.name; }
  size_t size_bytes() const override { return slot_.what.size_bytes; }
  size_t align_bytes() const override { return slot_.what.align_bytes; }
  std::byte* map(std::span<const DaxPiece> pieces) override {
    throw_fault(faults_, Operation::kMapDax, name());
    size_t total = 0;
    for (const DaxPiece& piece : pieces) total += piece.bytes;
    std::byte* begin = map_dax_file(slot_.file, name(), pieces, align_bytes(), false);
    slot_.mapped_bytes += total;
    return begin;
  }
  void unmap(std::span<std::byte> range) noexcept override {
    munmap(range.data(), range.size());
    slot_.mapped_bytes -= range.size();
  }

 private:
  Slot& slot_;
  FaultPlan& faults_;
};

SimulatedDaxBus::SimulatedDaxBus(const std::vector<SimulatedDax>& devices, FaultPlan& faults)
    : faults_(faults) {
  for (const SimulatedDax& device : devices) {
    const bool is_whole = device.align_bytes > 0 && device.size_bytes % device.align_bytes == 0;
    if (!is_dax_name(device.name) || !is_whole || device.size_bytes == 0) {
      throw InvalidArgument("simulated machine: device " + device.name + " of " +
                            std::to_string(device.size_bytes) +
                            " bytes; devices are daxX.Y, of whole pages of their alignment");
    }
    const auto [at, is_new] = slots_.try_emplace(device.name);
    if (!is_new) throw InvalidArgument("simulated machine: " + device.name + " appears twice");
    at->second.what = device;
    at->second.file = memfd_create(device.name.c_str(), MFD_CLOEXEC);
    if (at->second.file < 0 ||
        ftruncate(at->second.file, static_cast<off_t>(device.size_bytes)) != 0) {
      throw SystemError(errno, "simulate " + device.name + ": " + std::strerror(errno));
    }
  }
}

SimulatedDaxBus::~SimulatedDaxBus() {
  for (auto& [name, slot] : slots_) {
    if (slot.file >= 0) close(slot.file);
  }
}

SimulatedDaxBus::Slot& SimulatedDaxBus::find(const std::string& name,
                                             const std::string& call) const {
  const auto found = slots_.find(name);
  if (found != slots_.end()) return found->second;
  std::string known;
  for (const auto& [other, slot] : slots_) known += (known.empty() ? "" : ", ") + other;
  throw InvalidArgument(call + ": no such Device-DAX device; " +
                        (known.empty() ? "the simulated machine has none" : "there are " + known));
}

std::unique_ptr<DaxDevice> SimulatedDaxBus::open(const std::string& name) {
  const std::string call = "open device " + name;
  Slot& slot = find(name, call);
  if (slot.what.mode == "system-ram") {
    throw InvalidArgument(call + ": it is in mode system-ram, so its memory is node " +
                          std::to_string(slot.what.target_node) + "; place tensors on that node");
  }
  if (slot.what.mode != "devdax") {
    throw InvalidArgument(call + ": it is not in mode devdax (" + slot.what.mode + ")");
  }
  throw_fault(faults_, Operation::kOpenDax, name);
  if (slot.claimed.exchange(true)) {
    throw SystemError(EBUSY, call + ": another session holds it; a device serves one at a time");
  }
  return std::make_unique<Device>(slot, faults_);
}

uint64_t SimulatedDaxBus::mapped_bytes(const std::string& name) const {
  return find(name, "look at device " + name).mapped_bytes;
}

}  // namespace cxl_offload::os
