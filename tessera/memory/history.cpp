#include "tessera/memory/history.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/core/format.h"

namespace tessera {

int64_t total_of(const MemoryByCategory& bytes) { return std::accumulate(bytes.begin(), bytes.end(), int64_t{0}); }

const MemoryEvent* MemoryHistory::peak() const {
  const auto most =
      std::max_element(events.begin(), events.end(), [](const MemoryEvent& a, const MemoryEvent& b) { return total_of(a.after) < total_of(b.after); });
  return most == events.end() || total_of(most->after) <= total_of(before) ? nullptr : &*most;
}

std::vector<MemoryEvent> thin(const std::vector<MemoryEvent>& events, size_t n) {
  if (n <= 1) return events;
  std::vector<MemoryEvent> kept;
  for (size_t begin = 0; begin < events.size(); begin += n) {
    size_t most = begin;
    for (size_t i = begin; i < std::min(begin + n, events.size()); ++i) {
      if (total_of(events[i].after) > total_of(events[most].after)) most = i;
    }
    kept.push_back(events[most]);
  }
  return kept;
}

std::string category_table(const std::vector<std::pair<std::string, MemoryByCategory>>& columns) {
  std::string out = fmt::format("  {:<12}", "");
  for (const auto& column : columns) out += fmt::format("{:>16}", column.first);
  for (int c = 0; c < num_memory_categories; ++c) {
    out += fmt::format("\n  {:<12}", to_string(static_cast<MemoryCategory>(c)));
    for (const auto& column : columns) out += fmt::format("{:>16}", format_bytes(column.second[static_cast<size_t>(c)]));
  }
  out += fmt::format("\n  {:<12}", "total");
  for (const auto& column : columns) out += fmt::format("{:>16}", format_bytes(total_of(column.second)));
  return out + "\n";
}

std::string shape_text(const MemoryBlock& block) {
  return block.dtype ? fmt::format("[{}] {}", fmt::join(block.shape, ", "), c10::toString(*block.dtype)) : std::string();
}

std::string place_text(const MemoryBlock& block) {
  if (!block.name.empty()) return block.name;
  return block.module.empty() ? std::string() : "in " + block.module;
}

std::string block_table(const std::vector<MemoryBlock>& blocks) {
  std::string out;
  for (const auto& block : blocks) {
    out += fmt::format("  {:>10}  {:<24} {:<12} {}\n", format_bytes(block.bytes), shape_text(block), to_string(block.category), place_text(block));
  }
  return out;
}

}  // namespace tessera
