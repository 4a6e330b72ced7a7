// Numbers from the kernel's text files: node meminfo, distances, lists, cgroup limits.
#ifndef CXL_OFFLOAD_OS_LINUX_FILES_H_
#define CXL_OFFLOAD_OS_LINUX_FILES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "os/kernel.h"
#include "os/node_set.h"

namespace cxl_offload::os {

// Returns the whole file, or nothing when it cannot be read.
std::optional<std::string> read_text(const std::string& path);
std::optional<uint64_t> read_number(const std::string& path);
// "0-2,5" -> {0,1,2,5}; an empty text is an empty set.
NodeSet parse_node_list(const std::string& text);
// The bytes behind "KEY:  123 kB" in a meminfo-like text; `key` with its colon.
std::optional<uint64_t> find_kib(const std::string& text, const std::string& key);

// Returns the bytes of a transparent huge page, as the kernel's file says, or 2 MiB where it does
// not.
size_t read_transparent_huge_bytes(const std::string& path);

// Bytes of the node that the kernel manages in ZONE_MOVABLE.
uint64_t read_movable_bytes(NodeId node, size_t page_bytes);

// Free bytes of the node that an allocation leaves alone while another node has room: the low
// watermarks of its zones, and what lower zones keep for callers that cannot use higher zones.
// `zoneinfo` is the text of /proc/zoneinfo.
uint64_t withheld_bytes(const std::string& zoneinfo, NodeId node, size_t page_bytes);

// The tightest limit: the machine's available memory, or a cgroup around this process. Page cache
// that can be dropped counts as free.
Headroom read_process_headroom();

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_LINUX_FILES_H_
