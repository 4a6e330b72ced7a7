#include "os/dax_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/interrupt.h"
#include "os/populate.h"

namespace cxl_offload::os {
namespace {

bool is_number(const std::string& text) {
  return !text.empty() &&
         std::ranges::all_of(text, [](unsigned char c) { return std::isdigit(c); });
}

// How much is faulted in between two checks for a signal.
constexpr size_t kStepBytes = size_t{64} << 20;

// Faults every page in. Returns zero or an errno.
int populate(std::span<std::byte> range, size_t align_bytes) {
  const size_t step = std::max(kStepBytes, align_bytes);
  for (size_t offset = 0; offset < range.size(); offset += step) {
    check_interrupt();
    const auto part = range.subspan(offset, std::min(step, range.size() - offset));
    if (const int code = populate_for_writing(part); code != 0) return code;
  }
  return 0;
}

}  // namespace

bool is_dax_name(const std::string& name) {
  const size_t dot = name.find('.');
  return name.starts_with("dax") && dot != std::string::npos &&
         is_number(name.substr(3, dot - 3)) && is_number(name.substr(dot + 1));
}

std::byte* map_dax_file(int file, const std::string& name, std::span<const DaxPiece> pieces,
                        size_t align_bytes, bool populated) {
  size_t total = 0;
  for (const DaxPiece& piece : pieces) total += piece.bytes;
  const std::string what = "map " + format_bytes(total) + " of " + name;
  void* raw = mmap(nullptr, total + align_bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    throw OutOfMemory(what + ": no address space left (RLIMIT_AS or vm.max_map_count)");
  }
  auto* begin = static_cast<std::byte*>(raw);
  const size_t skip =
      (align_bytes - reinterpret_cast<uintptr_t>(begin) % align_bytes) % align_bytes;
  if (skip > 0) munmap(begin, skip);
  begin += skip;
  munmap(begin + total, align_bytes - skip);
  size_t done = 0;
  int code = 0;
  for (const DaxPiece& piece : pieces) {
    if (mmap(begin + done, piece.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
             static_cast<off_t>(piece.offset)) == MAP_FAILED) {
      code = errno;
      break;
    }
    done += piece.bytes;
  }
  try {
    if (code == 0 && populated) code = populate({begin, total}, align_bytes);
  } catch (...) {
    munmap(begin, total);
    throw;
  }
  if (code == 0) return begin;
  munmap(begin, total);
  throw SystemError(code, what + ": " + std::strerror(code));
}

}  // namespace cxl_offload::os
