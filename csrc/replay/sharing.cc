#include "replay/sharing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace cxl_offload::replay {
namespace {

constexpr double kEpsilon = 1e-12;
constexpr double kClose = 1e-10;
constexpr int kRounds = 200;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

Sharing::Sharing(std::vector<double> losses)
    : losses_(std::move(losses)), total_(losses_.size(), 0.0) {}

void Sharing::speeds(std::span<const Demand> jobs, std::span<double> out) {
  std::ranges::fill(out, 1.0);
  if (!find_contended(jobs)) return;
  agree(jobs.size());
  for (const Use& use : uses_) out[use.job] = std::min(out[use.job], use.allowed);
}

// What a resource still carries under congestion, as a share of what it carries at best. A job
// offers it as much as the other resources of the job would let through.
double Sharing::room_of(int32_t resource, std::span<const Demand> jobs) const {
  const double loss = losses_[static_cast<size_t>(resource)];
  if (loss == 0) return 1;
  double offered = 0;
  for (const Demand& job : jobs) {
    double here = 0;
    double elsewhere = 0;
    for (size_t i = 0; i < job.resources.size(); ++i) {
      if (job.resources[i] == resource) {
        here = job.shares[i];
      } else {
        elsewhere = std::max(elsewhere, job.shares[i]);
      }
    }
    if (here > 0) offered += elsewhere > 0 ? here / elsewhere : kInfinity;
  }
  return offered > 1 ? 1 - loss * (1 - 1 / offered) : 1;
}

bool Sharing::find_contended(std::span<const Demand> jobs) {
  touched_.clear();
  contended_.clear();
  uses_.clear();
  for (const Demand& job : jobs) {
    for (size_t i = 0; i < job.resources.size(); ++i) {
      double& total = total_[static_cast<size_t>(job.resources[i])];
      if (total == 0) touched_.push_back(job.resources[i]);
      total += job.shares[i];
    }
  }
  for (int32_t resource : touched_) {
    const double total = std::exchange(total_[static_cast<size_t>(resource)], 0.0);
    const double room = room_of(resource, jobs);
    if (total <= room + kEpsilon) continue;
    const size_t begin = uses_.size();
    for (size_t at = 0; at < jobs.size(); ++at) {
      for (size_t i = 0; i < jobs[at].resources.size(); ++i) {
        if (jobs[at].resources[i] != resource) continue;
        uses_.push_back({static_cast<uint32_t>(at), jobs[at].shares[i], 1.0});
      }
    }
    contended_.push_back({room, begin, uses_.size()});
  }
  return !contended_.empty();
}

// Each resource sets the speed that it allows its users, given what the other resources allow. This
// is repeated until no speed changes.
void Sharing::agree(size_t jobs) {
  if (uses_of_.size() < jobs) uses_of_.resize(jobs);
  for (size_t at = 0; at < jobs; ++at) uses_of_[at].clear();
  for (size_t at = 0; at < uses_.size(); ++at) {
    uses_of_[uses_[at].job].push_back(static_cast<uint32_t>(at));
  }
  for (int round = 0; round < kRounds; ++round) {
    double change = 0;
    for (const Contended& resource : contended_) {
      const double level = water_level(resource);
      for (size_t at = resource.begin; at < resource.end; ++at) {
        Use& use = uses_[at];
        const double speed = std::min(1.0, level / use.share);
        change = std::max(change, std::abs(speed - use.allowed));
        use.allowed = speed;
      }
    }
    if (change < kClose || contended_.size() == 1) return;
  }
}

// Returns the largest share that a user may get, chosen so that all users together use all there
// is.
double Sharing::water_level(const Contended& resource) {
  asked_.clear();
  for (size_t at = resource.begin; at < resource.end; ++at) {
    double elsewhere = 1;
    for (uint32_t other : uses_of_[uses_[at].job]) {
      if (other != at) elsewhere = std::min(elsewhere, uses_[other].allowed);
    }
    asked_.push_back(uses_[at].share * elsewhere);
  }
  std::ranges::sort(asked_);
  double room = resource.room;
  size_t left = asked_.size();
  for (double amount : asked_) {
    if (amount * static_cast<double>(left) >= room) return room / static_cast<double>(left);
    room -= amount;
    --left;
  }
  return kInfinity;
}

}  // namespace cxl_offload::replay
