// What libFuzzer drives (make -C tests/cpp fuzz), and test_fuzz_pool.cc replays with any compiler:
// bytes become operations on a pool, or on a session over simulated nodes, which are compared with
// a model after each.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

#include "core/error.h"
#include "fake_regions.h"
#include "fuzz_input.h"
#include "gpu/fake_driver.h"
#include "memory/pool.h"
#include "memory/session.h"
#include "simulated_ground.h"

namespace cxl_offload::memory {
namespace {

// Live blocks by address; knows nothing of regions, extents or slabs.
class Model {
 public:
  explicit Model(size_t page_bytes) : page_bytes_(page_bytes) {}

  void add(const Allocation& block) {
    const auto begin = reinterpret_cast<uintptr_t>(block.address());
    require(begin % (block.bytes() >= page_bytes_ ? page_bytes_ : 64) == 0, "alignment");
    require(block.capacity() >= block.bytes(), "capacity");
    const size_t unit = block.owns_pages() ? page_bytes_ : 64;
    const uintptr_t end = (begin + block.bytes() + unit - 1) / unit * unit;
    const auto next = ends_.lower_bound(begin);
    require(next == ends_.end() || next->first >= end, "overlap with the next block");
    require(next == ends_.begin() || std::prev(next)->second <= begin,
            "overlap with the one before");
    ends_[begin] = end;
    asked_ += block.bytes();
  }
  void remove(const Allocation& block) {
    ends_.erase(reinterpret_cast<uintptr_t>(block.address()));
    asked_ -= block.bytes();
  }
  void check(const Statistics& statistics) const {
    require(statistics.asked.bytes.current == asked_, "bytes asked for");
    require(statistics.asked.count.current == ends_.size(), "number of blocks");
    require(statistics.mapped.bytes.current ==
                statistics.held.bytes.current + statistics.waiting.bytes.current +
                    statistics.cached.bytes.current + statistics.lost.bytes.current,
            "mapped = held + waiting + cached + lost");
  }

 private:
  const size_t page_bytes_;
  std::map<uintptr_t, uintptr_t> ends_;
  size_t asked_ = 0;
};

FakeRules rules_of(Input& input, const std::shared_ptr<gpu::GpuDriver>& driver) {
  FakeRules rules;
  const size_t flags = input.byte();
  rules.page_bytes = flags & 1 ? size_t{64} << 10 : 4096;
  if (flags & 2) rules.cycle_bytes = 6 * rules.page_bytes;
  if (flags & 4) rules.odd_bytes = 4 * rules.page_bytes;
  if (flags & 8) rules.limit_bytes = 8 * kMiB;
  rules.refuse_release = (flags & 16) != 0;
  rules.keeps = (flags & 32) == 0;
  if (flags & 64) rules.driver = driver;
  return rules;
}

void drop(std::vector<std::shared_ptr<Allocation>>& live, Input& input, gpu::FakeDriver& driver,
          Model& model) {
  if (live.empty()) return;
  std::swap(live[input.byte() % live.size()], live.back());
  const size_t how = input.byte();
  if (how & 1) {
    live.back()->record_stream(how >> 4);
    driver.launch(how >> 4);
  }
  if ((how & 14) == 14 && live.back()->owns_pages()) live.back()->displace();
  model.remove(*live.back());
  live.pop_back();
}

void fuzz_pool(Input& input) {
  const auto driver = std::make_shared<gpu::FakeDriver>();
  const FakeRules rules = rules_of(input, driver);
  const auto source = std::make_shared<FakeSource>(rules);
  const auto pool = std::make_shared<Pool>(source, rules.driver);
  Model model(rules.page_bytes);
  std::vector<std::shared_ptr<Allocation>> live;
  while (!input.empty()) {
    const size_t operation = input.below(16);
    try {
      if (operation < 8) {
        auto block = pool->allocate(input.size(4 * kMiB));
        model.add(*block);
        live.push_back(std::move(block));
      } else if (operation < 13) {
        drop(live, input, *driver, model);
      } else if (operation == 13) {
        pool->trim();
      } else if (operation == 14) {
        driver->finish(input.below(16));
      } else if (rules.driver != nullptr) {
        driver->fail_registration(1 + input.below(3));
      }
    } catch (const OutOfMemory&) {
      require(rules.limit_bytes != SIZE_MAX, "out of memory without a limit");
    } catch (const SystemError&) {
      require(rules.driver != nullptr, "refused without a driver");
    }
    pool->check_invariants();
    model.check(pool->statistics());
    require(pool->statistics().mapped.bytes.current == source->account().now(), "mapped bytes");
  }
  live.clear();
  pool->trim();
  pool->check_invariants();
  require(rules.refuse_release || source->account().now() == 0, "memory that never came back");
  require(driver->counts().events == 0, "events that were not destroyed");
  require(driver->counts().wrong_unregisters == 0, "an address that was not registered");
}

Rule any_rule(Input& input) {
  const size_t flags = input.byte();
  const auto node = static_cast<os::NodeId>(flags % 3);
  const os::NodeId other = (node + 1) % 3;
  Rule rule;
  switch (flags / 3 % 5) {
    case 0:
      rule = rule_of(RuleKind::kBind, {{node}});
      break;
    case 1:
      rule = rule_of(RuleKind::kBind, {{node}, {other}});
      break;
    case 2:
      rule = rule_of(RuleKind::kPreferred, {{node}});
      break;
    case 3:
      rule = rule_of(RuleKind::kStripe, {{node, 1}, {other, 1}});
      break;
    default:
      rule = rule_of(RuleKind::kStripe, {{0, 4}, {1, 2}, {2, 1}});
  }
  rule.granule_bytes = 16 * kPage;
  rule.strict = (flags & 128) == 0;
  return rule;
}

struct Live {
  std::shared_ptr<PlacedBlock> block;
  uint64_t value = 0;

  void stamp() const { std::memcpy(block->range().data(), &value, length()); }
  void check() const {
    require(std::memcmp(block->range().data(), &value, length()) == 0, "contents");
    uint64_t placed = 0;
    for (const auto& [node, amount] : block->session().bytes_per_node(block->range())) {
      require(node >= 0, "a page that is not there");
      placed += amount;
    }
    require(placed == block->range().size(), "bytes placed");
  }
  size_t length() const { return std::min(block->range().size(), sizeof value); }
};

void inject(const Ground& ground, Input& input) {
  constexpr int kCodes[] = {ENOMEM, EPERM, EBUSY};
  os::Fault fault{static_cast<os::Operation>(input.below(os::kOperationCount)),
                  os::FaultEffect::kRefuse, 1 + input.below(4), kCodes[input.below(3)], -1};
  const size_t how = input.below(3);
  if (how == 1) fault.effect = os::FaultEffect::kPartial;
  if (how == 2) fault.effect = os::FaultEffect::kStray;
  try {
    ground.kernel->faults().add(fault);
  } catch (const InvalidArgument&) {  // there is no such fault
  }
}

// All of a block, or whole pages of it; parts beyond its end are refused.
void move_some(Input& input, PlacedBlock& block) {
  const size_t unit = block.unit_bytes();
  const size_t units = block.range().size() / unit;
  if (units == 0 || input.below(2) == 0) {
    block.move(any_rule(input));
    return;
  }
  const size_t offset = input.byte() % units * unit;
  block.move_part(offset, (1 + input.byte() % units) * unit, any_rule(input));
}

void step_session(const Ground& ground, const std::shared_ptr<Session>& session, Input& input,
                  std::vector<Live>& live) {
  const size_t operation = input.below(16);
  if (operation < 6) {
    Rule rule = any_rule(input);
    if (input.below(4) == 0)
      rule.pages = os::PageKind::kTransparentHuge, rule.granule_bytes = 2 * kMiB;
    Live fresh{session->allocate(input.size(24 * kMiB), rule, nullptr), input.byte() * 0x01010101};
    fresh.stamp();
    live.push_back(std::move(fresh));
  } else if (operation < 10 && !live.empty()) {
    std::swap(live[input.byte() % live.size()], live.back());
    ground.kernel->faults().clear();
    live.back().check();
    live.pop_back();
  } else if (operation < 13 && !live.empty()) {
    move_some(input, *live[input.byte() % live.size()].block);
  } else if (operation == 13) {
    session->trim();
  } else if (operation == 14) {
    ground.kernel->set_used_by_others(static_cast<os::NodeId>(input.below(3)),
                                      input.size(48 * kMiB));
  } else if (operation == 15) {
    inject(ground, input);
  }
}

void fuzz_session(Input& input) {
  const Ground ground(ground_machine(), {{1, 40 * kMiB}});
  const auto session = std::make_shared<Session>(ground.placer());
  std::vector<Live> live;
  while (!input.empty()) {
    try {
      step_session(ground, session, input, live);
    } catch (const OutOfMemory&) {
    } catch (const SystemError&) {
    } catch (const InvalidArgument&) {  // a move of less than a page; others that use too much
    }
    require(ground.accounts_agree(), "the budget and the kernel");
    const Statistics statistics = session->statistics();
    require(statistics.asked.count.current == live.size(), "number of blocks");
    const uint64_t used =
        ground.kernel->used_bytes(0) + ground.kernel->used_bytes(1) + ground.kernel->used_bytes(2);
    require(statistics.mapped.bytes.current == used, "mapped bytes");
    require(ground.kernel->used_bytes(1) <= 40 * kMiB, "the capacity of node 1");
  }
  ground.kernel->faults().clear();
  for (const Live& each : live) each.check();
  live.clear();
  session->trim();
  require(ground.all_returned(), "memory that never came back");
}

}  // namespace
}  // namespace cxl_offload::memory

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  cxl_offload::Input input(data, size);
  if (input.byte() % 2 == 0) {
    cxl_offload::memory::fuzz_pool(input);
  } else {
    cxl_offload::memory::fuzz_session(input);
  }
  return 0;
}
