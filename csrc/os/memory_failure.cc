#include "os/memory_failure.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "core/rounding.h"
#include "os/lost_ranges.h"
#include "os/node_set.h"
#include "os/watched_ranges.h"

namespace cxl_offload::os {
namespace {

// linux/mempolicy.h and linux/mman.h, which older C library headers lack.
constexpr unsigned kMpolFAddress = 1 << 1;
constexpr int kPopulateRead = 22;

constexpr int kLost = 0xff;

// The handler that ours calls for other signals. It is set before ours is installed for the first
// time.
struct sigaction before{};
constinit std::atomic<LossNotice> notice{nullptr};
constinit std::atomic<bool> installed{false};

// Fresh pages go to the nodes where those of the lost range were wanted. If that fails, the
// kernel's default does no harm.
void take_policy_of(const std::byte* lost, void* fresh, size_t bytes) noexcept {
  constexpr unsigned long kBits = kMaxNodes + 1;
  std::array<unsigned long, (kMaxNodes + 64) / 64> mask{};
  int mode = 0;
  if (syscall(SYS_get_mempolicy, &mode, mask.data(), kBits, lost, kMpolFAddress) != 0) return;
  const bool has_nodes = std::ranges::any_of(mask, [](auto word) { return word != 0; });
  if (has_nodes) syscall(SYS_mbind, fresh, bytes, mode, mask.data(), kBits, 0);
}

// Puts pages full of 0xff in place of lost ones. The pages are filled first and then put in place
// in one step, so nobody ever sees other bytes there. Async-signal-safe.
bool replace(std::span<std::byte> lost) noexcept {
  void* fresh = mmap(nullptr, lost.size(), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (fresh == MAP_FAILED) return false;
  take_policy_of(lost.data(), fresh, lost.size());
  std::memset(fresh, kLost, lost.size());
  void* placed =
      mremap(fresh, lost.size(), lost.size(), MREMAP_MAYMOVE | MREMAP_FIXED, lost.data());
  if (placed == lost.data()) return true;
  munmap(fresh, lost.size());
  return false;
}

// Returns the pages of a watched range that are lost with an error at `address`.
std::span<std::byte> pages_around(const WatchedRange& watched, std::byte* address,
                                  size_t unit_bytes) noexcept {
  const auto begin = reinterpret_cast<uintptr_t>(watched.range.data());
  const uintptr_t end = begin + watched.range.size();
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t first = std::max(begin, at - at % unit_bytes);
  const uintptr_t last = std::min(end, at - at % unit_bytes + unit_bytes);
  return watched.range.subspan(first - begin, last - first);
}

// Whether the pages were replaced already, because something used them before the early notice of
// them came. The notice is one more signal, to another thread, and must not replace what was
// written there since.
constinit std::array<std::atomic<const std::byte*>, 64> used_first{};
constinit std::atomic<size_t> used_count{0};

void remember_use(const std::byte* page) noexcept {
  used_first[used_count.fetch_add(1) % used_first.size()].store(page);
}

bool was_used(const std::byte* page) noexcept {
  for (auto& each : used_first) {
    const std::byte* found = page;
    if (each.compare_exchange_strong(found, nullptr)) return true;
  }
  return false;
}

bool survive(const siginfo_t& info, LossKind kind) noexcept {
  const WatchedReading reading;
  auto* address = static_cast<std::byte*>(info.si_addr);
  const auto watched = reading.find(address);
  if (!watched || (kind == LossKind::kGone && !watched->is_shared)) return false;
  size_t unit = watched->page_bytes;
  constexpr int kMostBits = 40;
  if (kind != LossKind::kGone && info.si_addr_lsb > 0 && info.si_addr_lsb < kMostBits) {
    unit = std::max(unit, size_t{1} << info.si_addr_lsb);
  }
  const auto lost = pages_around(*watched, address, unit);
  if (kind == LossKind::kEarly && was_used(lost.data())) return true;
  // The loss is written down first. So whoever reads 0xff there and then looks for a loss finds it.
  record_loss(lost, kind);
  if (kind == LossKind::kUsed) remember_use(lost.data());
  return replace(lost);
}

// Hands the signal to the handler that was there before.
void pass_on(int number, siginfo_t* info, void* context) noexcept {
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else if (before.sa_handler == SIG_IGN && info->si_code <= 0) {
    return;  // a process sent it, and it is ignored
  } else if (info->si_code == BUS_MCEERR_AO) {
    return;  // the kernel only told us because we asked; it tells whoever uses the page again
  } else {
    // By default the signal ends the process: the access fails again when we return.
    struct sigaction standard{};
    standard.sa_handler = SIG_DFL;
    sigaction(number, &standard, nullptr);
    raise(number);
  }
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  bool survived = false;
  if (installed.load(std::memory_order_relaxed)) {
    if (info->si_code == BUS_MCEERR_AR) survived = survive(*info, LossKind::kUsed);
    if (info->si_code == BUS_MCEERR_AO) survived = survive(*info, LossKind::kEarly);
    if (info->si_code == BUS_ADRERR) survived = survive(*info, LossKind::kGone);
  }
  if (survived) {
    if (const LossNotice told = notice.load(std::memory_order_relaxed)) told();
  } else {
    pass_on(number, info, context);
  }
  errno = saved;
}

// A thread that the kernel tells of lost pages before anything uses them. Each thread asks for that
// by itself. So programs that this process starts from other threads do not inherit the request.
void listen_for_early_notice() noexcept {
  sigset_t others;
  sigfillset(&others);
  sigdelset(&others, SIGBUS);
  pthread_sigmask(SIG_SETMASK, &others, nullptr);
  if (prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0, 0) != 0) return;
  for (;;) pause();
}

void prepare_for_forks() {
  static const int done = pthread_atfork(&hold_losses_for_fork, &release_losses_after_fork, [] {
    release_losses_after_fork();
    forget_parents_readings();
  });
  static_cast<void>(done);
}

void start_listening() {
  sigset_t all;
  sigset_t saved;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &saved);  // a new thread starts with what is blocked here
  try {
    std::thread(&listen_for_early_notice).detach();
  } catch (const std::system_error&) {  // no more threads: losses are known when they are used
  }
  pthread_sigmask(SIG_SETMASK, &saved, nullptr);
}

enum class Answer { kThere, kPoisoned, kGone };

// Asks the kernel for pages. Where the kernel has none, they count as there: it makes them at the
// first touch. Only pages of a file or device count as gone.
Answer ask(std::span<std::byte> pages) {
  if (madvise(pages.data(), pages.size(), kPopulateRead) == 0) return Answer::kThere;
  if (errno == EHWPOISON) return Answer::kPoisoned;
  if (errno != EFAULT) return Answer::kThere;
  const WatchedReading reading;
  const auto watched = reading.find(pages.data());
  return watched && watched->is_shared ? Answer::kGone : Answer::kThere;
}

std::mutex& install_mutex() {
  static std::mutex* const only = new std::mutex;
  return *only;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &on_bus_error;
}

struct sigaction action_now() {
  struct sigaction now{};
  if (sigaction(SIGBUS, nullptr, &now) != 0) {
    throw SystemError(errno, std::string("sigaction(SIGBUS): ") + std::strerror(errno));
  }
  return now;
}

}  // namespace

void survive_memory_failures(LossNotice told, const std::function<void()>& prepare) {
  const std::lock_guard lock(install_mutex());
  prepare_for_forks();
  const struct sigaction found = action_now();
  const bool is_there = is_ours(found) && installed.load();
  if (is_there) notice.store(told);
  if (is_there && !prepare) return;
  if (prepare) prepare();
  notice.store(told);  // not before somebody listens
  // If another handler has replaced ours, it may call ours. So ours cannot call it.
  if (!installed.load() && !is_ours(found)) before = found;
  struct sigaction ours{};
  ours.sa_sigaction = &on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&ours.sa_mask);
  if (sigaction(SIGBUS, &ours, nullptr) != 0) {
    throw SystemError(errno, std::string("sigaction(SIGBUS): ") + std::strerror(errno));
  }
  installed.store(true);
  static const bool listening = (start_listening(), true);
  static_cast<void>(listening);
}

void stop_surviving(const std::function<void()>& prepare) {
  const std::lock_guard lock(install_mutex());
  if (!installed.exchange(false)) return;
  notice.store(nullptr);
  // A handler that came later may call ours. Then ours stays installed, and only hands signals on.
  if (!is_ours(action_now())) return;
  if (prepare) prepare();
  sigaction(SIGBUS, &before, nullptr);
}

bool survives_memory_failures() {
  const std::lock_guard lock(install_mutex());
  return installed.load() && is_ours(action_now());
}

std::vector<std::span<std::byte>> find_lost_pages(std::span<std::byte> range, size_t page_bytes) {
  prepare_for_forks();
  std::vector<std::span<std::byte>> lost;
  // Large steps are asked first. They are almost always whole, and then one call is enough.
  constexpr size_t kStepBytes = size_t{64} << 20;
  const size_t step = round_up(kStepBytes, page_bytes);
  for (size_t at = 0; at < range.size();) {
    const size_t bytes = std::min(step, range.size() - at);
    const auto part = range.subspan(at, bytes);
    const Answer answer = ask(part);
    if (answer == Answer::kGone) {
      // All of it is lost. It is not replaced by memory of a node, which may not have as much.
      record_loss(range.subspan(at), LossKind::kGone);
      lost.push_back(range.subspan(at));
      break;
    }
    for (size_t page = 0; answer == Answer::kPoisoned && page < bytes; page += page_bytes) {
      const auto one = part.subspan(page, page_bytes);
      if (ask(one) != Answer::kPoisoned) continue;
      record_loss(one, LossKind::kAsked);
      if (!replace(one)) {
        throw SystemError(errno, "replace a lost page: the kernel has no room for the mapping");
      }
      lost.push_back(one);
    }
    at += bytes;
  }
  return lost;
}

}  // namespace cxl_offload::os
