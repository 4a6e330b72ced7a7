// Threads that stay alive between jobs, in groups bound near the nodes whose bytes they read.
#ifndef CXL_OFFLOAD_KERNELS_WORKER_TEAM_H_
#define CXL_OFFLOAD_KERNELS_WORKER_TEAM_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace cxl_offload::kernels {

struct WorkerGroup {
  int node = -1;          // whose bytes the group works on first; -1: any
  size_t threads = 1;     // at least 1
  std::vector<int> cpus;  // which its threads may use; none: those of the process
};

class WorkerTeam {
 public:
  // Throws InvalidArgument for no group, a group without threads, a node named twice, or a CPU that
  // this process may not use. No thread is started before the first job.
  explicit WorkerTeam(std::vector<WorkerGroup> groups);
  ~WorkerTeam();
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  const std::vector<WorkerGroup>& groups() const { return groups_; }
  size_t threads() const;

  // Runs job(group) on every thread and returns when all of them are done. The threads are those of
  // OpenMP where it has as many (kernels/openmp.h) and the team wants one on every CPU of its
  // groups, or has one group that is bound to no CPUs; the caller is then one of them, as it is in
  // a group that is not bound. Otherwise the caller waits. Several callers take turns. A job takes
  // its work from a queue, its group's first, as fewer threads than asked for may run it, and must
  // not throw. All threads compute in the caller's mode (kernels/float_mode.h). In a forked child,
  // where the threads of the parent are not, new ones are started. Throws SystemError when a thread
  // cannot be made or bound; then no job has run.
  void run(const std::function<void(size_t group)>& job);

 private:
  class Crew;
  Crew& crew();

  std::vector<WorkerGroup> groups_;
  std::atomic<Crew*> crew_;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_WORKER_TEAM_H_
