#include "os/dax_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace cxl_offload {
namespace {

constexpr int kMadvPopulateWrite = 23;

bool is_number(const std::string& text) {
  return !text.empty() &&
         std::ranges::all_of(text, [](unsigned char c) { return std::isdigit(c); });
}

// Faults every page in. Returns 0 or an errno.
int populate(std::byte* begin, size_t bytes) {
  int status = 0;
  do {
    status = madvise(begin, bytes, kMadvPopulateWrite);
  } while (status != 0 && (errno == EAGAIN || errno == EINTR));
  if (status == 0) return 0;
  if (errno != EINVAL) return errno;
  // Kernels before 5.14. The bytes are kept.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t offset = 0; offset < bytes; offset += page) {
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(begin + offset), 0, __ATOMIC_RELAXED);
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
  if (code == 0 && populated) code = populate(begin, total);
  if (code == 0) return begin;
  munmap(begin, total);
  throw SystemError(code, what + ": " + std::strerror(code));
}

}  // namespace cxl_offload
