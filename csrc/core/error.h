// Errors of the core. Each message names the call, the value, the limit and the remedy; the Python
// bindings turn them into MemoryError, OSError, ValueError and classes of cxl_offload.errors.
#ifndef CXL_OFFLOAD_CORE_ERROR_H_
#define CXL_OFFLOAD_CORE_ERROR_H_

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace cxl_offload {

// A node, a budget, a cgroup or a huge-page pool has no room for what was asked.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A system or driver call was refused; `code` is its errno.
class SystemError : public std::runtime_error {
 public:
  SystemError(int code, const std::string& message) : std::runtime_error(message), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

// The caller's arguments have no meaning.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Pages are on other nodes than a strict request demands.
class PlacementError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Bytes that a call used, or was to use, are lost because the memory under them failed. The error
// has the address and the size of each lost part.
class MemoryLost : public std::runtime_error {
 public:
  using Ranges = std::vector<std::pair<uintptr_t, size_t>>;
  MemoryLost(const std::string& message, Ranges ranges)
      : std::runtime_error(message), ranges_(std::move(ranges)) {}
  const Ranges& ranges() const { return ranges_; }

 private:
  Ranges ranges_;
};

// Returns "31.5 GiB" or the like: three significant digits and a binary unit. It is for messages
// only.
std::string format_bytes(uint64_t bytes);

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_ERROR_H_
