#include "core/fork_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <fstream>
#include <new>
#include <sstream>

#include "core/error.h"

namespace cxl_offload {
namespace {

// PF_FORKNOEXEC of linux/sched.h, a bit of the flags in /proc/PID/stat.
constexpr unsigned long kForkedWithoutExec = 0x40;
constexpr int kFlagsAfterName = 7;

// Identifies this process by a number that a forked child does not share with its parent. The
// number is in a page that is zero in children (MADV_WIPEONFORK). The first thread of a child that
// asks puts a new number there. Where the kernel is too old for that, the number is the process id.
class ProcessNumber {
 public:
  ProcessNumber() {
    const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    if (madvise(page, bytes, MADV_WIPEONFORK) == 0) {
      page_ = new (page) std::atomic<uint64_t>(1);
    } else {
      munmap(page, bytes);
    }
  }

  uint64_t get() noexcept {
    if (page_ == nullptr) return static_cast<uint64_t>(getpid());
    const uint64_t known = page_->load(std::memory_order_acquire);
    if (known != 0) return known;
    const uint64_t fresh = ++last_;
    uint64_t found = 0;
    return page_->compare_exchange_strong(found, fresh) ? fresh : found;
  }

 private:
  std::atomic<uint64_t>* page_ = nullptr;
  std::atomic<uint64_t> last_{1};  // children inherit it, so that none repeats a number of a parent
};

uint64_t process_number() noexcept {
  // This is never destroyed, because objects may ask while the process exits.
  static ProcessNumber* const number = new ProcessNumber;
  return number->get();
}

}  // namespace

ForkGuard::ForkGuard() : process_(process_number()) {}

bool ForkGuard::in_child() const noexcept { return process_number() != process_; }

void ForkGuard::refuse_in_child(const std::string& what) const {
  if (!in_child()) return;
  throw InvalidArgument(what +
                        " in a forked child: it belongs to the parent process; make one of the "
                        "child's own");
}

bool is_forked_process() {
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  // The text is "pid (name) state ...", and the name may contain any characters.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string skipped;
  for (int field = 1; field < kFlagsAfterName; ++field) fields >> skipped;
  unsigned long flags = 0;
  fields >> flags;
  return (flags & kForkedWithoutExec) != 0;
}

}  // namespace cxl_offload
