#include "os/linux_kernel.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <vector>

#include "core/error.h"
#include "os/linux_dax.h"
#include "os/linux_files.h"
#include "os/populate.h"

namespace cxl_offload::os {
namespace {

// linux/mempolicy.h and newer madvise values, which older C library headers lack.
constexpr int kMpolDefault = 0;
constexpr int kMpolPreferred = 1;
constexpr int kMpolBind = 2;
constexpr int kMpolInterleave = 3;
constexpr int kMpolLocal = 4;
constexpr int kMpolPreferredMany = 5;
constexpr int kMpolFMemsAllowed = 1 << 2;
constexpr int kMpolMfMove = 1 << 1;
constexpr int kHugeShift = 26;  // MAP_HUGE_SHIFT

constexpr const char* kTransparentHugeSize = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";

// The kernel copies one bit less than the given number (linux/mempolicy.c, get_nodes).
constexpr unsigned long kMaskBits = kMaxNodes + 1;

// The most pages in one move_pages call. It bounds the arrays, and the time until a signal is seen.
constexpr size_t kPagesPerCall = 16384;

[[noreturn]] void throw_refused(const std::string& call, int code) {
  std::string message = call + ": " + std::strerror(code);
  if (code == EPERM || code == ENOSYS) {
    message +=
        "; the container's seccomp profile refuses NUMA calls: run it with --cap-add SYS_NICE, or "
        "with a profile that allows mbind, set_mempolicy, get_mempolicy and move_pages";
  }
  throw SystemError(code, message);
}

std::string size_text(std::span<const std::byte> range) { return format_bytes(range.size()); }

int huge_flags(PageKind kind) {
  if (kind == PageKind::kHuge2MiB) return MAP_HUGETLB | (21 << kHugeShift);
  if (kind == PageKind::kHuge1GiB) return MAP_HUGETLB | (30 << kHugeShift);
  return 0;
}

const char* huge_pool(PageKind kind) {
  return kind == PageKind::kHuge1GiB ? "hugepages-1048576kB" : "hugepages-2048kB";
}

bool is_explicit(PageKind kind) {
  return kind == PageKind::kHuge2MiB || kind == PageKind::kHuge1GiB;
}

std::string node_folder(NodeId node) {
  return "/sys/devices/system/node/node" + std::to_string(node);
}

NodeSet nodes_with_memory() {
  return parse_node_list(read_text("/sys/devices/system/node/has_memory").value_or("0"));
}

// The calling thread's own memory policy, set to prefer one node and restored afterwards.
class ThreadPreference {
 public:
  explicit ThreadPreference(NodeId node) : saved_mask_(NodeSet().words()) {
    if (syscall(SYS_get_mempolicy, &saved_mode_, saved_mask_.data(), kMaskBits, nullptr, 0) != 0) {
      throw_refused("get_mempolicy", errno);
    }
    const auto mask = NodeSet{node}.words();
    if (syscall(SYS_set_mempolicy, kMpolPreferred, mask.data(), kMaskBits) != 0) {
      throw_refused("set_mempolicy(prefer node " + std::to_string(node) + ")", errno);
    }
  }
  ~ThreadPreference() {
    const bool has_nodes = std::ranges::any_of(saved_mask_, [](auto word) { return word != 0; });
    syscall(SYS_set_mempolicy, saved_mode_, has_nodes ? saved_mask_.data() : nullptr,
            has_nodes ? kMaskBits : 0);
  }
  ThreadPreference(const ThreadPreference&) = delete;
  ThreadPreference& operator=(const ThreadPreference&) = delete;

 private:
  int saved_mode_ = kMpolDefault;
  std::vector<unsigned long> saved_mask_;
};

// When NUMA balancing has marked a page, Linux 6.1 to 6.4 report it as absent until it is used.
bool hides_marked_pages() {
  utsname system{};
  int major = 0, minor = 0;
  if (uname(&system) != 0) return false;
  if (std::sscanf(system.release, "%d.%d", &major, &minor) != 2) return false;
  return major == 6 && minor >= 1 && minor <= 4 && nodes_with_memory().size() > 1;
}

class LinuxKernel final : public Kernel {
 public:
  explicit LinuxKernel(std::string dax_root)
      : base_page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
        transparent_huge_bytes_(read_transparent_huge_bytes(kTransparentHugeSize)),
        dax_root_(std::move(dax_root)),
        hides_marked_pages_(hides_marked_pages()) {}

  std::string name() const override { return "linux"; }
  NodeSet allowed_nodes() const override;
  size_t page_bytes(PageKind kind) const override;
  size_t transparent_huge_bytes() const override { return transparent_huge_bytes_; }
  Headroom node_headroom(NodeId node, PageKind kind) const override;
  Headroom process_headroom() const override { return read_process_headroom(); }
  std::vector<NodeId> fallback_order(NodeId node) const override;
  uint64_t movable_bytes(NodeId node) const override {
    return read_movable_bytes(node, base_page_bytes_);
  }
  NodeId local_node() const override;
  std::unique_ptr<DaxDevice> open_dax(const std::string& name) override {
    return open_linux_dax(dax_root_, name);
  }
  std::byte* map(size_t bytes, size_t alignment, PageKind kind) override;
  void unmap(std::span<std::byte> range) noexcept override;
  void set_policy(std::span<std::byte> range, const Policy& policy) override;
  void populate(std::span<std::byte> range, NodeId node) override;
  void discard(std::span<std::byte> range) override;
  void query(std::span<const std::byte> range, size_t page_bytes,
             std::span<int> nodes) const override;
  void move(std::span<std::byte> range, size_t page_bytes, std::span<const NodeId> targets,
            std::span<int> states) override;

 private:
  void advise_pages(std::byte* address, size_t bytes, PageKind kind) const;

  const size_t base_page_bytes_;
  const size_t transparent_huge_bytes_;
  const std::string dax_root_;
  const bool hides_marked_pages_;
};

NodeSet LinuxKernel::allowed_nodes() const {
  const NodeSet with_memory = nodes_with_memory();
  auto mask = NodeSet().words();
  if (syscall(SYS_get_mempolicy, nullptr, mask.data(), kMaskBits, nullptr, kMpolFMemsAllowed) !=
      0) {
    // A container may refuse the call. What the cgroup allows is also written here.
    const std::string status = read_text("/proc/self/status").value_or("");
    const size_t at = status.find("Mems_allowed_list:");
    if (at == std::string::npos) return with_memory;
    const size_t begin = status.find_first_of("0123456789", at);
    const NodeSet listed = parse_node_list(status.substr(begin, status.find('\n', begin) - begin));
    NodeSet allowed;
    for (NodeId node : with_memory.nodes()) {
      if (listed.contains(node)) allowed.insert(node);
    }
    return allowed;
  }
  constexpr size_t kWordBits = sizeof(unsigned long) * 8;
  NodeSet allowed;
  for (NodeId node : with_memory.nodes()) {
    const auto bit = static_cast<size_t>(node);
    if (mask[bit / kWordBits] >> (bit % kWordBits) & 1) allowed.insert(node);
  }
  return allowed;
}

size_t LinuxKernel::page_bytes(PageKind kind) const {
  if (kind == PageKind::kHuge2MiB) return kHugePageBytes;
  if (kind == PageKind::kHuge1GiB) return kGiganticPageBytes;
  return base_page_bytes_;
}

Headroom LinuxKernel::node_headroom(NodeId node, PageKind kind) const {
  const std::string folder = node_folder(node);
  if (is_explicit(kind)) {
    const std::string pool = folder + "/hugepages/" + huge_pool(kind);
    const uint64_t page = page_bytes(kind);
    return {read_number(pool + "/nr_hugepages").value_or(0) * page,
            read_number(pool + "/free_hugepages").value_or(0) * page,
            "the " + format_bytes(page) + " huge-page pool of node " + std::to_string(node) +
                " (write a larger count to " + pool + "/nr_hugepages)",
            0};
  }
  // A kernel without NUMA has no node folders. On a machine whose memory grows with use, the
  // numbers of its only node lag behind. In both cases, take the numbers of the whole machine.
  const bool is_only = nodes_with_memory().size() == 1;
  auto text = is_only ? std::nullopt : read_text(folder + "/meminfo");
  if (!text) text = read_text("/proc/meminfo").value_or("");
  // Clean page cache is reclaimed before an allocation on this node fails.
  const uint64_t cache =
      find_kib(*text, "Active(file):").value_or(0) + find_kib(*text, "Inactive(file):").value_or(0);
  return {find_kib(*text, "MemTotal:").value_or(0), find_kib(*text, "MemFree:").value_or(0) + cache,
          "node " + std::to_string(node),
          withheld_bytes(read_text("/proc/zoneinfo").value_or(""), node, base_page_bytes_)};
}

std::vector<NodeId> LinuxKernel::fallback_order(NodeId node) const {
  const auto online = parse_node_list(read_text("/sys/devices/system/node/online").value_or("0"));
  std::istringstream text(read_text(node_folder(node) + "/distance").value_or(""));
  std::vector<std::pair<int, NodeId>> by_distance;
  for (NodeId other : online.nodes()) {
    int distance = 0;
    text >> distance;
    if (other != node) by_distance.emplace_back(distance, other);
  }
  std::ranges::sort(by_distance);
  const NodeSet allowed = allowed_nodes();
  std::vector<NodeId> order;
  for (const auto& [distance, other] : by_distance) {
    if (allowed.contains(other)) order.push_back(other);
  }
  return order;
}

NodeId LinuxKernel::local_node() const {
  unsigned cpu = 0;
  unsigned node = 0;
  return getcpu(&cpu, &node) == 0 ? static_cast<NodeId>(node) : 0;
}

void LinuxKernel::advise_pages(std::byte* address, size_t bytes, PageKind kind) const {
  if (is_explicit(kind)) return;
  const bool huge = kind == PageKind::kTransparentHuge;
  if (madvise(address, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) == 0) return;
  // EINVAL: the kernel was built without transparent huge pages, so these are base pages anyway.
  if (errno == EINVAL && !huge) return;
  throw_refused("madvise(MADV_HUGEPAGE) on " + format_bytes(bytes), errno);
}

std::byte* LinuxKernel::map(size_t bytes, size_t alignment, PageKind kind) {
  const size_t page = page_bytes(kind);
  const size_t slack = alignment > page ? alignment : 0;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | huge_flags(kind);
  void* raw = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (raw == MAP_FAILED) {
    const int code = errno;
    if (code != ENOMEM) throw_refused("mmap of " + format_bytes(bytes), code);
    throw OutOfMemory("map " + format_bytes(bytes) + ": the kernel has no room for the mapping (" +
                      (is_explicit(kind) ? "its huge-page pool is too small"
                                         : "address space, RLIMIT_AS or vm.max_map_count") +
                      ")");
  }
  auto* begin = static_cast<std::byte*>(raw);
  if (slack != 0) {
    const size_t skip = (alignment - reinterpret_cast<uintptr_t>(begin) % alignment) % alignment;
    if (skip > 0) munmap(begin, skip);
    if (slack > skip) munmap(begin + skip + bytes, slack - skip);
    begin += skip;
  }
  try {
    advise_pages(begin, bytes, kind);
  } catch (...) {
    munmap(begin, bytes);
    throw;
  }
  return begin;
}

void LinuxKernel::unmap(std::span<std::byte> range) noexcept {
  if (munmap(range.data(), range.size()) == 0) return;
  // A hole splits a mapping in two, which vm.max_map_count may forbid. Then the pages are given
  // back and only the addresses are lost.
  madvise(range.data(), range.size(), MADV_DONTNEED);
}

void LinuxKernel::set_policy(std::span<std::byte> range, const Policy& policy) {
  const auto call = [&](int mode) {
    const auto mask = policy.nodes.words();
    const bool has_nodes = !policy.nodes.empty();
    return syscall(SYS_mbind, range.data(), range.size(), mode, has_nodes ? mask.data() : nullptr,
                   has_nodes ? kMaskBits : 0, 0);
  };
  long status = 0;
  switch (policy.mode) {
    case PolicyMode::kDefault:
      status = call(kMpolDefault);
      break;
    case PolicyMode::kLocal:
      status = call(kMpolLocal);
      break;
    case PolicyMode::kBind:
      status = call(kMpolBind);
      break;
    case PolicyMode::kInterleave:
      status = call(kMpolInterleave);
      break;
    case PolicyMode::kPreferredMany:
      status = call(kMpolPreferredMany);
      // Before 5.15 only one node can be preferred.
      if (status != 0 && errno == EINVAL) status = call(kMpolPreferred);
      break;
  }
  if (status != 0) {
    throw_refused("mbind of " + size_text(range) + " to nodes " + policy.nodes.to_string(), errno);
  }
  // A policy keeps NUMA balancing from marking pages. Faulting the pages in again removes the marks
  // that are there. The pages exist already, so nothing is lost when that is refused.
  const bool names_nodes = !policy.nodes.empty();
  if (hides_marked_pages_ && names_nodes) populate_for_writing(range);
}

void LinuxKernel::populate(std::span<std::byte> range, NodeId node) {
  const ThreadPreference preference(node);
  const int code = populate_for_writing(range);
  if (code == 0) return;
  if (code == EACCES) {
    throw InvalidArgument("fault in " + size_text(range) +
                          ": not all of the range is mapped for writing; map it with PROT_WRITE");
  }
  // EFAULT: a huge-page pool ran empty, or a file in memory has no room or is too short. ENOMEM: a
  // node, a cgroup or the machine has no room.
  if (code == ENOMEM || code == EFAULT) {
    throw OutOfMemory("fault in " + size_text(range) + " on node " + std::to_string(node) +
                      ": the kernel has no page left for it");
  }
  throw_refused("madvise(MADV_POPULATE_WRITE) of " + size_text(range), code);
}

void LinuxKernel::discard(std::span<std::byte> range) {
  if (madvise(range.data(), range.size(), MADV_DONTNEED) != 0) {
    throw_refused("madvise(MADV_DONTNEED) of " + size_text(range), errno);
  }
}

void LinuxKernel::query(std::span<const std::byte> range, size_t page_bytes,
                        std::span<int> nodes) const {
  std::vector<const void*> pages(std::min(nodes.size(), kPagesPerCall));
  for (size_t first = 0; first < nodes.size(); first += kPagesPerCall) {
    const size_t count = std::min(kPagesPerCall, nodes.size() - first);
    for (size_t i = 0; i < count; ++i) pages[i] = range.data() + (first + i) * page_bytes;
    if (syscall(SYS_move_pages, 0, count, pages.data(), nullptr, nodes.data() + first, 0) < 0) {
      throw_refused("move_pages (query of " + size_text(range) + ")", errno);
    }
  }
}

void LinuxKernel::move(std::span<std::byte> range, size_t page_bytes,
                       std::span<const NodeId> targets, std::span<int> states) {
  std::vector<void*> pages(std::min(targets.size(), kPagesPerCall));
  std::ranges::fill(states, kPageAbsent);  // the kernel does not answer for every page
  for (size_t first = 0; first < targets.size(); first += kPagesPerCall) {
    const size_t count = std::min(kPagesPerCall, targets.size() - first);
    for (size_t i = 0; i < count; ++i) pages[i] = range.data() + (first + i) * page_bytes;
    const long status = syscall(SYS_move_pages, 0, count, pages.data(), targets.data() + first,
                                states.data() + first, kMpolMfMove);
    // After ENOMEM (a full node) and EBUSY some pages have moved. The query below tells which.
    if (status < 0 && errno != ENOMEM && errno != EBUSY) {
      throw_refused("move_pages of " + size_text(range), errno);
    }
  }
  std::vector<int> nodes(states.size());
  query(range, page_bytes, nodes);
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (states[i] != kPageShared || nodes[i] == targets[i]) states[i] = nodes[i];
  }
}

}  // namespace

std::shared_ptr<Kernel> make_linux_kernel(const std::string& dax_root) {
  return std::make_shared<LinuxKernel>(dax_root);
}

}  // namespace cxl_offload::os
