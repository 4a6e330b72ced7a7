// A source of regions for pool tests. Without `backed` its addresses are only numbers, never used
// twice, so that terabytes can be asked for; with it they are memory.
#ifndef CXL_OFFLOAD_TESTS_FAKE_REGIONS_H_
#define CXL_OFFLOAD_TESTS_FAKE_REGIONS_H_

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "core/error.h"
#include "gpu/driver.h"
#include "memory/region.h"

namespace cxl_offload::memory {

struct FakeRules {
  size_t page_bytes = 4096;
  bool backed = false;
  bool keeps = true;       // else no region may serve twice, as after first touch
  size_t cycle_bytes = 0;  // of a stripe
  size_t odd_bytes = 0;    // a stripe's blocks of this size keep their shares only at offset 0
  size_t limit_bytes = SIZE_MAX;
  bool refuse_release = false;
  std::shared_ptr<gpu::GpuDriver> driver;  // pins with it
  std::function<void()> on_rule;           // called when the pool asks for the rule of a cut
  std::function<void()> on_return;         // called before a region is returned
};

// What is mapped, seen from outside the pool.
struct FakeAccount {
  std::mutex mutex;
  size_t mapped_bytes = 0;
  size_t peak_bytes = 0;
  size_t regions = 0;
  size_t obtained = 0;
  uintptr_t next_address = uintptr_t{1} << 44;

  void add(size_t bytes, size_t limit_bytes) {
    const std::lock_guard lock(mutex);
    if (bytes > limit_bytes - mapped_bytes) {
      throw OutOfMemory("obtain " + format_bytes(bytes) + ": the fake machine is full");
    }
    mapped_bytes += bytes;
    peak_bytes = std::max(peak_bytes, mapped_bytes);
    ++regions;
    ++obtained;
  }
  void subtract(size_t bytes, size_t gone) {
    const std::lock_guard lock(mutex);
    mapped_bytes -= bytes;
    regions -= gone;
  }
  size_t now() {
    const std::lock_guard lock(mutex);
    return mapped_bytes;
  }
};

class FakeRegion final : public Region {
 public:
  FakeRegion(const FakeRules& rules, std::shared_ptr<FakeAccount> account, size_t bytes)
      : rules_(rules), account_(std::move(account)), bytes_(bytes), left_(bytes) {
    if (rules_.backed) {
      void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw OutOfMemory("mmap");
      begin_ = static_cast<std::byte*>(memory);
    } else {
      const std::lock_guard lock(account_->mutex);
      begin_ = reinterpret_cast<std::byte*>(account_->next_address);
      account_->next_address += bytes + rules_.page_bytes;
    }
    try {
      if (rules_.driver) rules_.driver->register_host(range());
    } catch (...) {
      if (rules_.backed) munmap(begin_, bytes_);
      throw;
    }
  }
  ~FakeRegion() override {
    if (rules_.on_return) rules_.on_return();
    if (rules_.driver) rules_.driver->unregister_host(begin_);
    if (rules_.backed) munmap(begin_, bytes_);
    account_->subtract(left_, 1);
  }

  std::span<std::byte> range() const override { return {begin_, bytes_}; }
  size_t page_bytes() const override { return rules_.page_bytes; }
  bool pinned() const override { return rules_.driver != nullptr; }
  bool keeps_rule(size_t offset, size_t bytes) const override {
    if (rules_.on_rule) rules_.on_rule();
    if (!rules_.keeps) return false;
    if (rules_.cycle_bytes == 0 || offset == 0) return true;
    return offset % rules_.cycle_bytes == 0 && bytes != rules_.odd_bytes;
  }
  size_t next_cut(size_t offset) const override {
    const size_t unit = rules_.cycle_bytes > 0 ? rules_.cycle_bytes : rules_.page_bytes;
    return (offset + unit - 1) / unit * unit;
  }
  std::string why_fixed() const override { return "its pages are made up"; }
  void release(size_t offset, size_t bytes) override {
    if (pinned() || offset % rules_.page_bytes != 0 || bytes % rules_.page_bytes != 0 ||
        bytes == 0 || offset + bytes > bytes_) {
      std::abort();  // the pool broke the contract, where it may not throw
    }
    if (rules_.refuse_release) throw SystemError(12, "munmap: too many mappings");
    if (rules_.backed) {
      // Any use of what was given back ends the test.
      mprotect(begin_ + offset, bytes, PROT_NONE);
      madvise(begin_ + offset, bytes, MADV_DONTNEED);
    }
    {
      const std::lock_guard lock(account_->mutex);
      left_ -= bytes;
    }
    account_->subtract(bytes, 0);
  }

 private:
  const FakeRules rules_;
  const std::shared_ptr<FakeAccount> account_;
  std::byte* begin_ = nullptr;
  const size_t bytes_;
  size_t left_;
};

class FakeSource final : public RegionSource {
 public:
  explicit FakeSource(FakeRules rules) : rules_(std::move(rules)) {}

  size_t page_bytes() const override { return rules_.page_bytes; }
  std::unique_ptr<Region> obtain(size_t bytes) override {
    if (on_obtain) on_obtain(bytes);
    const size_t size = (bytes + rules_.page_bytes - 1) / rules_.page_bytes * rules_.page_bytes;
    account_->add(size, rules_.limit_bytes);
    try {
      return std::make_unique<FakeRegion>(rules_, account_, size);
    } catch (...) {
      account_->subtract(size, 1);
      throw;
    }
  }

  FakeAccount& account() const { return *account_; }
  std::function<void(size_t)> on_obtain;  // set before the pool is used

 private:
  const FakeRules rules_;
  const std::shared_ptr<FakeAccount> account_ = std::make_shared<FakeAccount>();
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_TESTS_FAKE_REGIONS_H_
