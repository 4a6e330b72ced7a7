#include "os/populate.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <sstream>

#include "os/linux_files.h"

namespace cxl_offload::os {
namespace {

// linux/mman.h, which older C library headers lack.
constexpr int kMadvPopulateWrite = 23;

size_t base_page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

int advise(std::span<std::byte> range) {
  int status = 0;
  do {
    status = madvise(range.data(), range.size(), kMadvPopulateWrite);
  } while (status != 0 && (errno == EAGAIN || errno == EINTR));
  return status == 0 ? 0 : errno;
}

bool is_writable_now(std::span<const std::byte> range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  return is_writable(read_text("/proc/self/maps").value_or(""), begin, begin + range.size());
}

// Serves kernels without the call. It writes to every page without changing a byte.
int touch(std::span<std::byte> range) {
  if (!is_writable_now(range)) return EACCES;
  for (size_t offset = 0; offset < range.size(); offset += base_page_bytes()) {
    // It is atomic, because others may be writing to pages that are there already.
    auto* byte = reinterpret_cast<unsigned char*>(range.data() + offset);
    __atomic_fetch_or(byte, 0, __ATOMIC_RELAXED);
  }
  return 0;
}

}  // namespace

bool has_populate_write() {
  static const bool known = [] {
    const size_t bytes = base_page_bytes();
    void* page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return true;
    const bool is_there = madvise(page, bytes, kMadvPopulateWrite) == 0 || errno != EINVAL;
    munmap(page, bytes);
    return is_there;
  }();
  return known;
}

int populate_for_writing(std::span<std::byte> range) {
  if (!has_populate_write()) return touch(range);
  const int code = advise(range);
  // The kernel also returns EINVAL for a range that may not be written, and ENOMEM for one that is
  // not mapped.
  if (code == 0 || is_writable_now(range)) return code;
  return EACCES;
}

bool is_writable(const std::string& maps, uintptr_t begin, uintptr_t end) {
  std::istringstream lines(maps);
  for (std::string line; begin < end && std::getline(lines, line);) {
    unsigned long long first = 0, last = 0;
    char read = '-', write = '-';
    if (std::sscanf(line.c_str(), "%llx-%llx %c%c", &first, &last, &read, &write) != 4) continue;
    if (last <= begin) continue;
    if (first > begin || write != 'w') return false;
    begin = last;
  }
  return begin >= end;
}

}  // namespace cxl_offload::os
