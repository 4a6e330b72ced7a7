#include "memory/statistics.h"

#include <algorithm>

namespace cxl_offload::memory {

void Gauge::add(uint64_t amount) {
  current += amount;
  total += amount;
  peak = std::max(peak, current);
}

void Gauge::set(uint64_t level) {
  if (level > current) {
    add(level - current);
  } else {
    current = level;
  }
}

Gauge& Gauge::operator+=(const Gauge& other) {
  current += other.current;
  peak += other.peak;
  total += other.total;
  return *this;
}

void Tally::add(uint64_t amount) {
  bytes.add(amount);
  count.add(1);
}

void Tally::subtract(uint64_t amount) {
  bytes.subtract(amount);
  count.subtract(1);
}

Tally& Tally::operator+=(const Tally& other) {
  bytes += other.bytes;
  count += other.count;
  return *this;
}

Statistics& Statistics::operator+=(const Statistics& other) {
  asked += other.asked;
  held += other.held;
  waiting += other.waiting;
  cached += other.cached;
  lost += other.lost;
  mapped += other.mapped;
  reuses += other.reuses;
  growths += other.growths;
  synchronizations += other.synchronizations;
  event_waits += other.event_waits;
  return *this;
}

Statistics Statistics::past() const {
  Statistics gone = *this;
  for (Tally* tally :
       {&gone.asked, &gone.held, &gone.waiting, &gone.cached, &gone.lost, &gone.mapped}) {
    tally->bytes.current = tally->count.current = 0;
  }
  return gone;
}

}  // namespace cxl_offload::memory
