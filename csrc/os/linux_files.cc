#include "os/linux_files.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <fstream>
#include <limits>
#include <sstream>

namespace cxl_offload::os {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// cgroup v1 writes "no limit" as a huge multiple of the page size.
constexpr uint64_t kCgroupV1Unlimited = uint64_t{1} << 62;

std::optional<uint64_t> parse_number(const std::string& text) {
  uint64_t value = 0;
  const char* begin = text.data();
  const auto [end, error] = std::from_chars(begin, begin + text.size(), value);
  if (error != std::errc() || end == begin) return std::nullopt;
  return value;
}

// Returns the value of a line such as "key 123" in memory.stat.
uint64_t stat_value(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string name, value; lines >> name >> value;) {
    if (name == key) return parse_number(value).value_or(0);
  }
  return 0;
}

struct CgroupFiles {
  const char* root;
  const char* limit;
  const char* usage;
};

// Lowers `tightest` to the limits of every cgroup from `path` up to the root of its hierarchy.
void tighten_by_cgroups(const CgroupFiles& files, std::string path, Headroom& tightest) {
  for (;; path = path.substr(0, path.rfind('/'))) {
    const std::string folder = files.root + path;
    const auto limit = read_number(folder + "/" + files.limit);
    const auto usage = read_number(folder + "/" + files.usage);
    if (limit && usage && *limit < kCgroupV1Unlimited) {
      const std::string stat = read_text(folder + "/memory.stat").value_or("");
      const uint64_t cache = stat_value(stat, "inactive_file") + stat_value(stat, "active_file");
      const uint64_t used = *usage > cache ? *usage - cache : 0;
      const uint64_t free = *limit > used ? *limit - used : 0;
      if (free < tightest.free_bytes) {
        tightest = {*limit, free, "cgroup " + (path.empty() ? "/" : path) + " " + files.limit};
      }
    }
    if (path.empty() || path.find('/') == std::string::npos) return;
  }
}

}  // namespace

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<uint64_t> read_number(const std::string& path) {
  const auto text = read_text(path);
  return text ? parse_number(*text) : std::nullopt;
}

NodeSet parse_node_list(const std::string& text) {
  NodeSet nodes;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    const auto first = parse_number(range);
    if (!first) continue;
    const size_t dash = range.find('-');
    const auto last = dash == std::string::npos ? first : parse_number(range.substr(dash + 1));
    for (uint64_t node = *first; node <= last.value_or(*first); ++node) {
      nodes.insert(static_cast<NodeId>(node));
    }
  }
  return nodes;
}

std::optional<uint64_t> find_kib(const std::string& text, const std::string& key) {
  const size_t at = text.find(key);
  if (at == std::string::npos) return std::nullopt;
  const size_t digit = text.find_first_of("0123456789", at + key.size());
  if (digit == std::string::npos) return std::nullopt;
  const auto value = parse_number(text.substr(digit, 24));
  return value ? std::optional<uint64_t>(*value * 1024) : std::nullopt;
}

size_t read_transparent_huge_bytes(const std::string& path) {
  const uint64_t bytes = read_number(path).value_or(0);
  return std::has_single_bit(bytes) ? bytes : kHugePageBytes;
}

uint64_t read_movable_bytes(NodeId node, size_t page_bytes) {
  std::istringstream words(read_text("/proc/zoneinfo").value_or(""));
  bool is_movable = false;
  for (std::string word, value; words >> word;) {
    if (word == "Node" && words >> value) {
      is_movable = value == std::to_string(node) + ",";
    } else if (is_movable && word == "zone" && words >> value) {
      is_movable = value == "Movable";
    } else if (is_movable && word == "managed" && words >> value) {
      return parse_number(value).value_or(0) * page_bytes;
    }
  }
  return 0;
}

uint64_t withheld_bytes(const std::string& zoneinfo, NodeId node, size_t page_bytes) {
  std::istringstream lines(zoneinfo);
  const std::string own_zone = "Node " + std::to_string(node) + ",";
  bool is_own = false;
  uint64_t free_pages = 0;
  uint64_t low_pages = 0;
  uint64_t withheld_pages = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("Node ")) is_own = line.starts_with(own_zone);
    if (!is_own) continue;
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name == "pages") {
      words >> name >> free_pages;
    } else if (name == "low") {
      words >> low_pages;
    } else if (name == "protection:") {
      // "(0, 1922, 2393)": callers that may use every zone must leave the last number free.
      const size_t last = line.find_last_of(", (");
      const uint64_t kept = parse_number(line.substr(last + 1)).value_or(0);
      withheld_pages += std::min(free_pages, low_pages + kept);
    }
  }
  return withheld_pages * page_bytes;
}

Headroom read_process_headroom() {
  const std::string meminfo = read_text("/proc/meminfo").value_or("");
  Headroom tightest{find_kib(meminfo, "MemTotal:").value_or(kUnlimited),
                    find_kib(meminfo, "MemAvailable:").value_or(kUnlimited),
                    "memory of the machine"};
  std::istringstream lines(read_text("/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const size_t path = line.rfind(':');
    if (path == std::string::npos) continue;
    if (line.starts_with("0::")) {
      tighten_by_cgroups({"/sys/fs/cgroup", "memory.max", "memory.current"}, line.substr(path + 1),
                         tightest);
    } else if (line.find(":memory:") != std::string::npos) {
      tighten_by_cgroups(
          {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"},
          line.substr(path + 1), tightest);
    }
  }
  return tightest;
}

}  // namespace cxl_offload::os
