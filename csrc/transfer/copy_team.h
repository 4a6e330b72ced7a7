// Threads that stay and share out pieces of work: making threads costs more than most copies.
#ifndef CXL_OFFLOAD_TRANSFER_COPY_TEAM_H_
#define CXL_OFFLOAD_TRANSFER_COPY_TEAM_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace cxl_offload {

// Thread-safe: one sharing out at a time, others wait for it.
class CopyTeam {
 public:
  // One thread on each of these CPUs, beside the caller's own. Throws InvalidArgument for a CPU
  // that this process may not run on.
  explicit CopyTeam(const std::vector<int>& helper_cpus);
  ~CopyTeam();
  CopyTeam(const CopyTeam&) = delete;
  CopyTeam& operator=(const CopyTeam&) = delete;

  // With the caller.
  size_t threads() const { return helpers_.size() + 1; }
  // work(i) once for every i below `pieces`, which must not throw, by up to `threads` threads;
  // returns when all are done.
  void share_out(size_t pieces, size_t threads, const std::function<void(size_t)>& work);

 private:
  void help(size_t number);
  void drain();

  std::mutex sharing_;  // held by who shares out

  std::mutex mutex_;  // guards what follows
  std::condition_variable start_;
  std::condition_variable done_;
  const std::function<void(size_t)>* work_ = nullptr;
  size_t pieces_ = 0;
  size_t wanted_ = 0;  // helpers that may join
  size_t busy_ = 0;    // helpers that have joined
  uint64_t round_ = 0;
  bool ending_ = false;

  std::atomic<size_t> next_{0};
  std::vector<std::thread> helpers_;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_TRANSFER_COPY_TEAM_H_
