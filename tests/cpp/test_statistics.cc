#include "check.h"
#include "memory/statistics.h"

namespace cxl_offload::memory {
namespace {

TEST(gauge_keeps_current_peak_and_total) {
  Gauge gauge;
  gauge.add(10);
  gauge.add(5);
  gauge.subtract(12);
  gauge.add(4);
  CHECK_EQ(gauge.current, 7u);
  CHECK_EQ(gauge.peak, 15u);
  CHECK_EQ(gauge.total, 19u);
}

TEST(gauge_set_counts_rises_only) {
  Gauge gauge;
  gauge.set(8);
  gauge.set(3);
  gauge.set(5);
  CHECK_EQ(gauge.current, 5u);
  CHECK_EQ(gauge.peak, 8u);
  CHECK_EQ(gauge.total, 10u);
}

TEST(statistics_of_two_pools_add_up) {
  Statistics first, second;
  first.asked.add(100);
  first.asked.add(50);
  first.asked.subtract(100);
  first.mapped.add(4096);
  first.reuses = 3;
  second.asked.add(7);
  second.waiting.add(64);
  second.lost.add(128);
  second.cached.add(1);
  second.held.add(4096);
  second.growths = 2;
  second.synchronizations = 5;
  second.event_waits = 6;
  Statistics sum = first;
  sum += second;
  CHECK_EQ(sum.asked.bytes.current, 57u);
  CHECK_EQ(sum.asked.bytes.peak, 157u);
  CHECK_EQ(sum.asked.bytes.total, 157u);
  CHECK_EQ(sum.asked.count.current, 2u);
  CHECK_EQ(sum.asked.count.total, 3u);
  CHECK_EQ(sum.mapped.bytes.current, 4096u);
  CHECK_EQ(sum.waiting.bytes.current, 64u);
  CHECK_EQ(sum.lost.bytes.current, 128u);
  CHECK_EQ(sum.cached.count.current, 1u);
  CHECK_EQ(sum.held.bytes.current, 4096u);
  CHECK_EQ(sum.reuses, 3u);
  CHECK_EQ(sum.growths, 2u);
  CHECK_EQ(sum.synchronizations, 5u);
  CHECK_EQ(sum.event_waits, 6u);
}

}  // namespace
}  // namespace cxl_offload::memory
