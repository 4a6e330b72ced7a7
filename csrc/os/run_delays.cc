#include "os/run_delays.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

namespace cxl_offload::os {
namespace {

constexpr char kThreads[] = "/proc/self/task";

// From "running waiting runs". No stream: this is read for every thread, many times a second.
// Nothing where the thread has ended, or the kernel does not count.
std::optional<RunDelay> read_delay(const char* thread) {
  const std::string path = std::string(kThreads) + "/" + thread + "/schedstat";
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  char text[96];
  const ssize_t length = ::read(file, text, sizeof text);
  ::close(file);
  if (length <= 0) return std::nullopt;
  const char* const end = text + length;
  const char* const first = std::find(static_cast<const char*>(text), end, ' ');
  if (first == end) return std::nullopt;
  RunDelay found;
  const auto waited = std::from_chars(first + 1, end, found.waited_ns);
  if (waited.ec != std::errc() || waited.ptr == end) return std::nullopt;
  if (std::from_chars(waited.ptr + 1, end, found.runs).ec != std::errc()) return std::nullopt;
  return found;
}

}  // namespace

RunDelays read_run_delays() {
  RunDelays found;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(kThreads), &closedir);
  if (folder == nullptr) return found;
  const int caller = gettid();
  while (const dirent* entry = readdir(folder.get())) {
    const char* const name = entry->d_name;
    int thread = 0;
    const auto [end, error] = std::from_chars(name, name + std::strlen(name), thread);
    if (error != std::errc() || *end != '\0' || thread == caller) continue;
    if (const auto delay = read_delay(name)) found.emplace(thread, *delay);
  }
  return found;
}

uint64_t longest_wait(const RunDelays& before, const RunDelays& after, uint64_t wake_up_ns) {
  uint64_t longest = 0;
  for (const auto& [thread, now] : after) {
    const auto known = before.find(thread);
    // Fewer runs than before: another thread has this number now.
    const bool is_same = known != before.end() && known->second.runs <= now.runs &&
                         known->second.waited_ns <= now.waited_ns;
    const RunDelay then = is_same ? known->second : RunDelay{};
    const uint64_t waited = now.waited_ns - then.waited_ns;
    const uint64_t woken = (now.runs - then.runs) * wake_up_ns;
    if (waited > woken) longest = std::max(longest, waited - woken);
  }
  return longest;
}

}  // namespace cxl_offload::os
