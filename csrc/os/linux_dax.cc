#include "os/linux_dax.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "core/error.h"
#include "os/linux_files.h"

namespace cxl_offload::os {
namespace {

namespace fs = std::filesystem;

constexpr size_t kUsualAlignment = size_t{2} << 20;

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int get() const { return descriptor_; }

 private:
  const int descriptor_;
};

class LinuxDaxDevice final : public DaxDevice {
 public:
  LinuxDaxDevice(std::string name, std::unique_ptr<File> file, size_t size, size_t align)
      : name_(std::move(name)), file_(std::move(file)), size_(size), align_(align) {}

  const std::string& name() const override { return name_; }
  size_t size_bytes() const override { return size_; }
  size_t align_bytes() const override { return align_; }
  std::byte* map(std::span<const DaxPiece> pieces) override {
    return map_dax_file(file_->get(), name_, pieces, align_, true);
  }
  void unmap(std::span<std::byte> range) noexcept override { munmap(range.data(), range.size()); }

 private:
  const std::string name_;
  const std::unique_ptr<File> file_;
  const size_t size_;
  const size_t align_;
};

// The devices of the machine, for an error about one that is not there.
std::string known_devices(const fs::path& folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    names.push_back(entry.path().filename());
  }
  std::ranges::sort(names);
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "this machine has no Device-DAX devices" : "there are " + text;
}

void check_mode(const fs::path& device, const std::string& what, const std::string& name) {
  std::error_code error;
  const std::string driver = fs::read_symlink(device / "driver", error).filename();
  if (driver == "device_dax") return;
  const std::string command = "sudo daxctl reconfigure-device --force --mode=devdax " + name;
  if (driver == "kmem") {
    const auto node = read_number(device / "target_node");
    throw InvalidArgument(what + ": it is in mode system-ram, so its memory is node " +
                          (node ? std::to_string(*node) : "unknown") +
                          "; place tensors on that node, or take it off: " + command);
  }
  throw InvalidArgument(what + ": it is not in mode devdax (its driver: " +
                        (driver.empty() ? "none" : driver) + "); bind it: " + command);
}

std::unique_ptr<File> open_file(const std::string& path, const std::string& what) {
  auto file = std::make_unique<File>(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file->get() < 0) {
    const int code = errno;
    std::string remedy;
    if (code == EACCES || code == EPERM) remedy = "; allow it: sudo setfacl -m u:$USER:rw " + path;
    if (code == ENOENT) remedy = "; in a container add --device " + path;
    throw SystemError(code, what + ": " + path + ": " + std::strerror(code) + remedy);
  }
  if (flock(file->get(), LOCK_EX | LOCK_NB) != 0) {
    const int code = errno == EWOULDBLOCK ? EBUSY : errno;
    throw SystemError(code, what + ": " +
                                (code == EBUSY ? "another session or process holds it; a device "
                                                 "serves one at a time"
                                               : std::strerror(code)));
  }
  return file;
}

}  // namespace

std::unique_ptr<DaxDevice> open_linux_dax(const std::string& root, const std::string& name) {
  const std::string what = "open device " + name;
  const fs::path folder = root + "/sys/bus/dax/devices";
  std::error_code error;
  if (!is_dax_name(name) || !fs::exists(folder / name, error)) {
    throw InvalidArgument(what + ": no such Device-DAX device; " + known_devices(folder));
  }
  check_mode(folder / name, what, name);
  const size_t align = read_number(folder / name / "align").value_or(kUsualAlignment);
  const size_t size = read_number(folder / name / "size").value_or(0);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (align < page || (align & (align - 1)) != 0 || size < align) {
    throw InvalidArgument(what + ": its size of " + std::to_string(size) + " bytes and alignment " +
                          "of " + std::to_string(align) + " leave nothing to map");
  }
  auto file = open_file(root + "/dev/" + name, what);
  return std::make_unique<LinuxDaxDevice>(name, std::move(file), size / align * align, align);
}

}  // namespace cxl_offload::os
