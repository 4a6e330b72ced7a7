#include "memory/outside_pages.h"

#include <algorithm>

#include "core/error.h"
#include "core/rounding.h"
#include "memory/fault_in.h"
#include "memory/layout.h"

namespace cxl_offload::memory {
namespace {

void check_parts(const Parts& parts, size_t page) {
  const std::string what = "place " + std::to_string(parts.count) + " parts of " +
                           std::to_string(parts.part_bytes) + " B, " +
                           std::to_string(parts.stride_bytes) + " B apart";
  const auto address = reinterpret_cast<uintptr_t>(parts.range.data());
  if (parts.count == 0 || parts.part_bytes == 0) throw InvalidArgument(what + ": nothing to place");
  if (address % page != 0 || parts.part_bytes % page != 0 || parts.stride_bytes % page != 0) {
    throw InvalidArgument(what + ": they are no whole pages of " + format_bytes(page));
  }
  // Where the last part ends; nothing where that does not fit into a size.
  const auto begin = checked_product(parts.count - 1, parts.stride_bytes);
  const auto end = begin ? checked_sum(*begin, parts.part_bytes) : std::nullopt;
  const bool is_inside =
      end && *end <= parts.range.size() && checked_sum(address, parts.range.size());
  if (parts.stride_bytes < parts.part_bytes || !is_inside) {
    throw InvalidArgument(what + ": they overlap, or leave their range of " +
                          format_bytes(parts.range.size()));
  }
}

// Pages that come back from swap only prefer their node, because a full node must not get a process
// killed.
os::Policy policy_of(const Rule& rule) {
  if (rule.kind == RuleKind::kFirstTouch) return {os::PolicyMode::kLocal, {}};
  return {os::PolicyMode::kPreferredMany, rule.nodes()};
}

}  // namespace

std::vector<std::string> place_outside(const Placer& placer, const Rule& rule, const Parts& parts) {
  os::Kernel& kernel = *placer.kernel;
  if (rule.kind == RuleKind::kDevice) {
    throw InvalidArgument("place shared memory on " + rule.describe() +
                          ": its pages belong to nodes; name a node");
  }
  if (rule.kind == RuleKind::kReplicate) {
    throw InvalidArgument("place shared memory as " + rule.describe() +
                          ": it has one copy only; bind or interleave it");
  }
  check_rule(rule, kernel);
  const size_t page = kernel.page_bytes(os::PageKind::kBase);
  check_parts(parts, page);
  if (rule.kind == RuleKind::kFirstTouch) return {};
  const size_t total = parts.count * parts.part_bytes;
  Layout layout = lay_out(rule, total, kernel, *placer.budget, placer.reserve);
  const RunMap wanted(layout.runs);
  Placed all;
  for (size_t i = 0; i < parts.count; ++i) {
    const auto part = parts.range.subspan(i * parts.stride_bytes, parts.part_bytes);
    const auto runs = wanted.slice(i * parts.part_bytes, parts.part_bytes);
    const Placed placed = fault_in(kernel, part, runs, page, placer.max_threads);
    all.shared_bytes += placed.shared_bytes;
    for (Run run : placed.runs) {
      run.offset += i * parts.part_bytes;
      all.runs.push_back(run);
    }
  }
  check_places(rule, layout.runs, all, layout.notes);
  // A policy for each part would cut the mapping into more pieces than a process may have.
  if (parts.count == 1) kernel.set_policy(parts.range.first(parts.part_bytes), policy_of(rule));
  return layout.notes;
}

}  // namespace cxl_offload::memory
