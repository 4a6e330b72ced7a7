#include "replay/steps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/error.h"

namespace cxl_offload::replay {
namespace {

// How much of a time that is over rounding may leave, as a share of that time.
constexpr double kDust = 1e-12;

[[noreturn]] void refuse(const std::string& what) { throw InvalidArgument("run_steps: " + what); }

void check_begins(std::span<const int64_t> begins, size_t end, const char* name) {
  if (begins.empty() || begins.front() != 0 || begins.back() != static_cast<int64_t>(end)) {
    refuse(std::string(name) + " must lead from 0 to " + std::to_string(end));
  }
  if (!std::ranges::is_sorted(begins)) refuse(std::string(name) + " must not descend");
}

void check(const Jobs& jobs, const std::vector<double>& losses, const Times& times) {
  const size_t count = jobs.setup_s.size();
  if (jobs.alone_s.size() != count || times.starts_s.size() != count ||
      times.ends_s.size() != count || jobs.demand_begins.size() != count + 1) {
    refuse("arrays of jobs differ in length");
  }
  if (jobs.resources.size() != jobs.shares.size()) refuse("resources and shares differ in length");
  check_begins(jobs.demand_begins, jobs.resources.size(), "demand_begins");
  check_begins(jobs.queue_begins, count, "queue_begins");
  check_begins(jobs.step_begins, jobs.queue_begins.size() - 1, "step_begins");
  if (times.step_s.size() + 1 != jobs.step_begins.size()) refuse("step_s is not one a step");
  for (size_t at = 0; at < count; ++at) {
    const double setup = jobs.setup_s[at];
    const double alone = jobs.alone_s[at];
    if (!(setup >= 0) || !(alone >= 0) || std::isinf(setup) || std::isinf(alone)) {
      refuse("seconds of job " + std::to_string(at) + " are not finite and at least 0");
    }
  }
  for (int32_t resource : jobs.resources) {
    if (resource < 0 || static_cast<size_t>(resource) >= losses.size()) {
      refuse("resource " + std::to_string(resource) + " of " + std::to_string(losses.size()));
    }
  }
  for (double share : jobs.shares) {
    if (!(share > 0) || share > 1 + kDust) refuse("a share is not above 0 and at most 1");
  }
  for (double loss : losses) {
    if (!(loss >= 0) || loss >= 1) refuse("a loss is not at least 0 and below 1");
  }
}

// The rest of a job that runs at the head of its queue.
struct Head {
  int64_t job;
  int64_t end;  // one past the queue's last job
  double begun;
  double setup;
  double left;  // seconds alone
};

class StepRunner {
 public:
  StepRunner(const Jobs& jobs, const std::vector<double>& losses, const Times& times)
      : jobs_(jobs), sharing_(losses), times_(times) {}

  double run(int64_t first_queue, int64_t last_queue) {
    live_.clear();
    for (int64_t queue = first_queue; queue < last_queue; ++queue) {
      const int64_t begin = jobs_.queue_begins[static_cast<size_t>(queue)];
      const int64_t end = jobs_.queue_begins[static_cast<size_t>(queue) + 1];
      if (begin < end) live_.push_back(head_at(begin, end, 0));
    }
    double now = 0;
    while (!live_.empty()) {
      now += advance();
      finish(now);
    }
    return now;
  }

 private:
  Head head_at(int64_t job, int64_t end, double now) const {
    const auto at = static_cast<size_t>(job);
    return {job, end, now, jobs_.setup_s[at], jobs_.alone_s[at]};
  }

  Demand demand_of(int64_t job) const {
    const auto at = static_cast<size_t>(job);
    const auto begin = static_cast<size_t>(jobs_.demand_begins[at]);
    const size_t count = static_cast<size_t>(jobs_.demand_begins[at + 1]) - begin;
    return {jobs_.resources.subspan(begin, count), jobs_.shares.subspan(begin, count)};
  }

  // Goes on to the next end of a set-up or of a job. Returns how long that takes.
  double advance() {
    working_.clear();
    demands_.clear();
    double wait = std::numeric_limits<double>::infinity();
    for (Head& head : live_) {
      if (head.setup > 0) {
        wait = std::min(wait, head.setup);
      } else if (head.left > 0) {
        working_.push_back(&head);
        demands_.push_back(demand_of(head.job));
      } else {
        wait = 0;  // a job that moves nothing is over at once
      }
    }
    speeds_.resize(working_.size());
    sharing_.speeds(demands_, speeds_);
    for (size_t at = 0; at < working_.size(); ++at) {
      wait = std::min(wait, working_[at]->left / speeds_[at]);
    }
    for (size_t at = 0; at < working_.size(); ++at) {
      working_[at]->left = without_dust(working_[at]->left, wait * speeds_[at]);
    }
    for (Head& head : live_) {
      if (head.setup > 0) head.setup = without_dust(head.setup, wait);
    }
    return wait;
  }

  static double without_dust(double before, double gone) {
    const double rest = before - gone;
    return rest > kDust * before ? rest : 0;
  }

  void finish(double now) {
    std::erase_if(live_, [&](Head& head) {
      if (head.setup > 0 || head.left > 0) return false;
      times_.starts_s[static_cast<size_t>(head.job)] = head.begun;
      times_.ends_s[static_cast<size_t>(head.job)] = now;
      if (head.job + 1 == head.end) return true;
      head = head_at(head.job + 1, head.end, now);
      return false;
    });
  }

  const Jobs& jobs_;
  Sharing sharing_;
  const Times& times_;
  std::vector<Head> live_;
  std::vector<Head*> working_;
  std::vector<Demand> demands_;
  std::vector<double> speeds_;
};

}  // namespace

void run_steps(const Jobs& jobs, const std::vector<double>& losses, const Times& times) {
  check(jobs, losses, times);
  StepRunner runner(jobs, losses, times);
  for (size_t step = 0; step < times.step_s.size(); ++step) {
    times.step_s[step] = runner.run(jobs.step_begins[step], jobs.step_begins[step + 1]);
  }
}

}  // namespace cxl_offload::replay
