#include "kernels/worker_team.h"

#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "core/cpus.h"
#include "core/error.h"
#include "core/fork_guard.h"
#include "core/signals.h"
#include "kernels/float_mode.h"
#include "kernels/openmp.h"

namespace cxl_offload::kernels {
namespace {

void check_groups(const std::vector<WorkerGroup>& groups) {
  if (groups.empty()) throw InvalidArgument("a team of no threads; give at least one group");
  for (size_t i = 0; i < groups.size(); ++i) {
    const WorkerGroup& group = groups[i];
    const std::string name = "the threads of node " + std::to_string(group.node);
    if (group.threads == 0) throw InvalidArgument(name + ": 0; give at least one");
    for (size_t j = 0; j < i; ++j) {
      if (groups[j].node == group.node) throw InvalidArgument(name + " are given twice");
    }
    check_cpus(name, group.cpus);
  }
}

}  // namespace

// The live threads of one process. A forked child does not touch its parent's crew: threads that
// the child does not have may hold the locks of that crew for ever.
class WorkerTeam::Crew {
 public:
  explicit Crew(const std::vector<WorkerGroup>& groups)
      : groups_(groups),
        caller_works_(groups.size() == 1 && groups[0].cpus.empty()),
        threads_on_every_cpu_(std::ranges::all_of(
            groups, [](const WorkerGroup& group) { return group.threads == group.cpus.size(); })) {}

  ~Crew() { dismiss(); }

  bool in_child() const { return guard_.in_child(); }

  void run(const std::function<void(size_t)>& given) {
    const std::function<void(size_t)> job = [&given,
                                             mode = FloatMode::of_this_thread()](size_t group) {
      const ScopedFloatMode as_the_caller(mode);
      given(group);
    };
    const std::lock_guard turn(turn_);
    if (borrow(job)) return;
    if (threads_.empty()) start();
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      working_ = threads_.size();
      ++generation_;
    }
    wake_.notify_all();
    if (caller_works_) job(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return working_ == 0; });
    job_ = nullptr;
  }

 private:
  // Runs the job on threads of OpenMP. Returns false, without running it, where none of them fit.
  bool borrow(const std::function<void(size_t)>& job) {
    if (caller_works_) return run_on_openmp(groups_[0].threads, [&job] { job(0); });
    if (!threads_on_every_cpu_) return false;
    size_t count = 0;
    for (const WorkerGroup& group : groups_) count += group.threads;
    // There has to be one thread for every CPU. The scheduler then keeps one on each CPU, so that
    // some threads are near each node.
    return run_on_openmp(count, [this, &job] { job(group_at(sched_getcpu())); });
  }

  size_t group_at(int cpu) const {
    const auto here = std::ranges::find_if(groups_, [cpu](const WorkerGroup& group) {
      return std::ranges::find(group.cpus, cpu) != group.cpus.end();
    });
    return here == groups_.end() ? 0 : static_cast<size_t>(here - groups_.begin());
  }

  void start() {
    error_ = 0;
    stop_ = false;
    size_t wanted = 0;
    try {
      const NoSignals here;
      for (size_t group = 0; group < groups_.size(); ++group) {
        const size_t skipped = caller_works_ ? 1 : 0;
        for (size_t i = skipped; i < groups_[group].threads; ++i, ++wanted) {
          threads_.emplace_back([this, group, seen = generation_] { work(group, seen); });
        }
      }
    } catch (const std::system_error& refused) {
      dismiss();
      throw SystemError(refused.code().value(),
                        "start the threads of a team: only " + std::to_string(wanted) +
                            " could be made; ask for fewer or raise the limit (ulimit -u)");
    }
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return ready_ == threads_.size(); });
    if (error_ == 0) return;
    lock.unlock();
    dismiss();
    throw SystemError(error_, std::string("bind the threads of a team: ") + std::strerror(error_) +
                                  "; name CPUs of this process's cpuset");
  }

  void dismiss() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    ready_ = 0;
  }

  void work(size_t group, uint64_t seen) {
    const int refused = bind_thread(groups_[group].cpus);
    std::unique_lock lock(mutex_);
    if (refused != 0) error_ = refused;
    ++ready_;
    done_.notify_all();
    while (true) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      const auto* job = job_;
      lock.unlock();
      (*job)(group);
      lock.lock();
      if (--working_ == 0) done_.notify_all();
    }
  }

  const ForkGuard guard_;
  const std::vector<WorkerGroup> groups_;
  const bool caller_works_;
  const bool threads_on_every_cpu_;
  std::mutex turn_;  // held by the caller whose job runs
  std::vector<std::thread> threads_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(size_t)>* job_ = nullptr;
  uint64_t generation_ = 0;
  size_t working_ = 0;
  size_t ready_ = 0;
  int error_ = 0;
  bool stop_ = false;
};

WorkerTeam::WorkerTeam(std::vector<WorkerGroup> groups) : groups_(std::move(groups)) {
  check_groups(groups_);
  crew_ = new Crew(groups_);
}

WorkerTeam::~WorkerTeam() {
  Crew* crew = crew_.load();
  if (!crew->in_child()) delete crew;
}

size_t WorkerTeam::threads() const {
  size_t count = 0;
  for (const WorkerGroup& group : groups_) count += group.threads;
  return count;
}

WorkerTeam::Crew& WorkerTeam::crew() {
  Crew* crew = crew_.load();
  while (crew->in_child()) {
    auto fresh = std::make_unique<Crew>(groups_);
    if (crew_.compare_exchange_strong(crew, fresh.get())) crew = fresh.release();
  }
  return *crew;
}

void WorkerTeam::run(const std::function<void(size_t group)>& job) { crew().run(job); }

}  // namespace cxl_offload::kernels
