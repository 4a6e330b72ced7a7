// Pinned regions: registered as a whole with the GPU driver, and looked at again afterwards,
// because a long-term pin moves pages out of movable memory.
#ifndef CXL_OFFLOAD_MEMORY_PINNED_H_
#define CXL_OFFLOAD_MEMORY_PINNED_H_

#include <memory>

#include "gpu/driver.h"
#include "memory/numa_region.h"
#include "memory/region.h"

namespace cxl_offload {

class PinnedSource final : public RegionSource {
 public:
  PinnedSource(Placer placer, Rule rule, std::shared_ptr<GpuDriver> driver);
  size_t page_bytes() const override { return source_.page_bytes(); }
  std::unique_ptr<Region> obtain(size_t bytes) override;

 private:
  NumaSource source_;
  std::shared_ptr<GpuDriver> driver_;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_MEMORY_PINNED_H_
