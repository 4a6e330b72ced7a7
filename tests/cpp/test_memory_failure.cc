// Memory that breaks. The hardware's part is played by a file that becomes shorter under its
// mapping, which is a real SIGBUS, and by signals that this process sends to itself as the kernel
// would.
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "core/fork_guard.h"
#include "os/lost_ranges.h"
#include "os/memory_failure.h"
#include "os/watched_ranges.h"

// The handlers of the sanitizers would end a process with a report instead.
extern "C" const char* __asan_default_options() { return "handle_sigbus=0"; }
extern "C" const char* __tsan_default_options() { return "handle_sigbus=0"; }

namespace cxl_offload::os {
namespace {

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// Pages that are watched, private or of a file in memory.
class Pages {
 public:
  Pages(size_t count, bool is_shared) : bytes_(count * kPage) {
    if (is_shared) file_ = memfd_create("pages", 0);
    if (is_shared && ftruncate(file_, static_cast<off_t>(bytes_)) != 0) throw std::bad_alloc();
    const int flags = is_shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    data_ = static_cast<std::byte*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, file_, 0));
    std::memset(data_, 7, bytes_);
    watch({range(), kPage, is_shared});
  }
  ~Pages() {
    unwatch(range());
    settle(range());
    munmap(data_, bytes_);
    if (file_ >= 0) close(file_);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::span<std::byte> range() const { return {data_, bytes_}; }
  std::byte* page(size_t number) const { return data_ + number * kPage; }
  int read(size_t number) const {
    return std::to_integer<int>(*const_cast<volatile std::byte*>(page(number)));
  }
  // The file ends before this page: what lies behind is gone.
  void cut(size_t number) const {
    CHECK_EQ(ftruncate(file_, static_cast<off_t>(number * kPage)), 0);
  }

 private:
  size_t bytes_;
  std::byte* data_ = nullptr;
  int file_ = -1;
};

// As the kernel does for a lost page; the pages around are those of the system.
void send(int code, std::byte* address) {
  siginfo_t info{};
  info.si_signo = SIGBUS;
  info.si_code = code;
  info.si_addr = address;
  info.si_addr_lsb = static_cast<short>(__builtin_ctzl(kPage));
  CHECK_EQ(syscall(SYS_rt_tgsigqueueinfo, getpid(), gettid(), SIGBUS, &info), 0);
}

int signal_that_ends(const std::function<void()>& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

std::atomic<int> notices{0};

void notice() { notices.fetch_add(1); }

struct Surviving {
  Surviving() { survive_memory_failures(&notice); }
  ~Surviving() { stop_surviving(); }
};

TEST(page_that_is_gone_reads_as_0xff_and_is_written_down) {
  const Surviving surviving;
  const Pages pages(4, true);
  pages.cut(2);
  CHECK_EQ(pages.read(1), 7);
  const int before = notices.load();
  CHECK_EQ(pages.read(2), 0xff);
  CHECK_EQ(notices.load(), before + 1);
  const auto lost = losses();
  CHECK_EQ(lost.size(), 1u);
  CHECK(lost[0].range.data() == pages.page(2));
  CHECK_EQ(lost[0].range.size(), kPage);
  CHECK(lost[0].kind == LossKind::kGone);
  CHECK_EQ(pages.read(1), 7);
}

TEST(page_that_is_gone_ends_a_process_that_does_not_survive) {
  const Pages pages(2, true);
  pages.cut(1);
  CHECK_EQ(signal_that_ends([&] { pages.read(1); }), SIGBUS);
}

TEST(signal_outside_of_watched_ranges_ends_the_process) {
  const Surviving surviving;
  const Pages pages(4, true);
  unwatch({pages.page(2), kPage});
  pages.cut(1);
  CHECK_EQ(signal_that_ends([&] { pages.read(2); }), SIGBUS);
  CHECK_EQ(signal_that_ends([&] { pages.read(3); }), 0);
  CHECK_EQ(signal_that_ends([&] { kill(getpid(), SIGBUS); }), SIGBUS);
  CHECK_EQ(losses().size(), 0u);
}

TEST(page_of_private_memory_is_lost_by_a_memory_error_only) {
  const Surviving surviving;
  const Pages pages(4, false);
  send(BUS_MCEERR_AR, pages.page(1) + 100);
  CHECK_EQ(pages.read(0), 7);
  CHECK_EQ(pages.read(1), 0xff);
  CHECK_EQ(pages.read(2), 7);
  send(BUS_MCEERR_AO, pages.page(3));
  CHECK_EQ(pages.read(3), 0xff);
  const auto lost = losses();
  CHECK_EQ(lost.size(), 2u);
  CHECK(lost[0].kind == LossKind::kUsed && lost[1].kind == LossKind::kEarly);
  // A pool of huge pages that ran empty loses nothing.
  CHECK_EQ(signal_that_ends([&] { send(BUS_ADRERR, pages.page(2)); }), SIGBUS);
}

TEST(early_notice_that_comes_late_takes_nothing_away) {
  const Surviving surviving;
  const Pages pages(1, false);
  send(BUS_MCEERR_AR, pages.page(0));
  *pages.page(0) = std::byte{3};
  settle(pages.range());
  send(BUS_MCEERR_AO, pages.page(0));
  CHECK_EQ(pages.read(0), 3);
  CHECK(!any_loss());
  send(BUS_MCEERR_AO, pages.page(0));
  CHECK_EQ(pages.read(0), 0xff);
}

TEST(early_notice_of_memory_of_others_ends_nothing) {
  const Surviving surviving;
  std::array<std::byte, 1> own{};
  send(BUS_MCEERR_AO, own.data());
  CHECK_EQ(losses().size(), 0u);
  CHECK_EQ(signal_that_ends([&] { send(BUS_MCEERR_AR, own.data()); }), SIGBUS);
}

std::atomic<int> others{0};

void other_handler(int, siginfo_t*, void*) { others.fetch_add(1); }

TEST(handler_that_was_there_before_gets_the_rest_and_is_back_afterwards) {
  struct sigaction other{};
  other.sa_sigaction = &other_handler;
  other.sa_flags = SA_SIGINFO;
  struct sigaction saved{};
  sigaction(SIGBUS, &other, &saved);
  std::array<std::byte, 1> own{};
  {
    const Surviving surviving;
    CHECK(survives_memory_failures());
    send(BUS_MCEERR_AR, own.data());
    kill(getpid(), SIGBUS);
    CHECK_EQ(others.load(), 2);
    const Pages pages(1, false);
    send(BUS_MCEERR_AR, pages.page(0));
    CHECK_EQ(others.load(), 2);
    CHECK_EQ(losses().size(), 1u);
  }
  CHECK(!survives_memory_failures());
  struct sigaction now{};
  sigaction(SIGBUS, &saved, &now);
  CHECK(now.sa_sigaction == &other_handler);
}

TEST(losses_stand_until_they_are_settled_part_by_part) {
  const Surviving surviving;
  const Pages pages(8, false);
  for (const size_t number : {1, 2, 5}) send(BUS_MCEERR_AR, pages.page(number));
  CHECK(any_loss());
  CHECK_EQ(losses_in({pages.page(0), kPage}).size(), 0u);
  CHECK_EQ(losses_in({pages.page(2) + 10, 4 * kPage}).size(), 2u);
  CHECK_EQ(losses_in({pages.page(2) + 10, 20}).at(0).range.size(), 20u);
  settle({pages.page(2) + 10, 20});
  const auto rest = losses_in({pages.page(2), kPage});
  CHECK_EQ(rest.size(), 2u);
  CHECK_EQ(rest[0].range.size() + rest[1].range.size(), kPage - 20);
  settle({pages.page(0), 3 * kPage});
  CHECK_EQ(losses().size(), 1u);
  settle(pages.range());
  CHECK(!any_loss());
}

TEST(more_losses_at_once_than_can_be_written_down_are_not_forgotten) {
  CHECK_EQ(signal_that_ends([] {
             const Surviving surviving;
             const Pages pages(2000, true);
             pages.cut(0);
             for (size_t number = 0; number < 2000; ++number) pages.read(number);
             const bool right = losses().size() == 1024 && unknown_losses() == 2000 - 1024;
             settle(pages.range());
             _exit(right && any_loss() ? 0 : 1);
           }),
           0);
}

TEST(threads_that_use_lost_pages_together_all_go_on) {
  const Surviving surviving;
  const Pages pages(64, true);
  pages.cut(0);
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        for (size_t number = 0; number < 64; ++number) wrong += pages.read(number) != 0xff;
      });
    }
  }
  CHECK_EQ(wrong.load(), 0);
  size_t bytes = 0;
  for (const Loss& loss : losses()) bytes += loss.range.size();
  CHECK_EQ(bytes, 64 * kPage);
}

TEST(ranges_come_and_go_while_a_handler_looks_for_them) {
  const Surviving surviving;
  const Pages pages(2, false);
  std::atomic<bool> stop{false};
  std::jthread other([&] {
    while (!stop) {
      const Pages mine(3, false);
      unwatch({mine.page(1), kPage});
    }
  });
  for (int round = 0; round < 300; ++round) {
    send(BUS_MCEERR_AR, pages.page(round % 2));
    CHECK_EQ(pages.read(round % 2), 0xff);
    CHECK_EQ(losses_in(pages.range()).size(), 1u);
    *pages.page(round % 2) = std::byte{1};
    settle(pages.range());
  }
  stop = true;
}

TEST(forked_child_survives_and_takes_its_ranges_out) {
  const Surviving surviving;
  const Pages pages(4, true);
  CHECK_EQ(signal_that_ends([&] {
             pages.cut(1);
             if (pages.read(1) != 0xff || losses().size() != 1) _exit(1);
             unwatch(pages.range());
             settle(pages.range());
             _exit(any_loss() ? 2 : 0);
           }),
           0);
  CHECK(!any_loss());
}

TEST(pages_that_are_asked_and_are_whole_stay) {
  const Pages pages(300, false);
  CHECK(find_lost_pages(pages.range(), kPage).empty());
  CHECK_EQ(pages.read(299), 7);
}

}  // namespace
}  // namespace cxl_offload::os
