// How jobs that run at the same time share resources: max-min fairness on every bottleneck.
//
// Every job asks for speed 1: the speed at which it runs alone. A resource that cannot serve all
// its users at that speed gives them equal shares of itself. A user that asks for less, or that
// another resource holds back, leaves the rest to the others. So two copies over one link get half
// of it each, whatever their sizes. And a copy that its link slows down takes no more of a node's
// bandwidth than the link lets through.
#ifndef CXL_OFFLOAD_REPLAY_SHARING_H_
#define CXL_OFFLOAD_REPLAY_SHARING_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cxl_offload::replay {

// What a job needs of the resources it uses, as shares of each at speed 1: above 0, at most 1.
struct Demand {
  std::span<const int32_t> resources;
  std::span<const double> shares;
};

class Sharing {
 public:
  // `losses`: for each resource, the largest share of it that congestion can cost, below 1 and 0
  // for most. Such a resource has less to share when it is offered more than it carries.
  explicit Sharing(std::vector<double> losses);

  // The speed of each job, in (0, 1]. A job below 1 uses a resource that is full, and no other job
  // has more of that resource.
  void speeds(std::span<const Demand> jobs, std::span<double> out);

  size_t resources() const { return losses_.size(); }

 private:
  // One job's use of one contended resource.
  struct Use {
    uint32_t job;
    double share;
    double allowed;  // the speed that this resource lets the job have
  };
  struct Contended {
    double room;   // share of the resource that can be given out
    size_t begin;  // of its uses
    size_t end;
  };

  double room_of(int32_t resource, std::span<const Demand> jobs) const;
  bool find_contended(std::span<const Demand> jobs);
  void agree(size_t jobs);
  double water_level(const Contended& resource);

  const std::vector<double> losses_;
  std::vector<double> total_;  // by resource, zero between calls
  std::vector<int32_t> touched_;
  std::vector<Contended> contended_;
  std::vector<Use> uses_;
  std::vector<std::vector<uint32_t>> uses_of_;  // by job
  std::vector<double> asked_;
};

}  // namespace cxl_offload::replay

#endif  // CXL_OFFLOAD_REPLAY_SHARING_H_
