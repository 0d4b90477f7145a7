#include "tessera/comm/flight_record/text.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/comm/failure.h"

namespace tessera::comm::flight {
namespace {

std::string message_text(bool sends, uint64_t sequence, int peer, const RecordedGroup& group, int tag) {
  return fmt::format("{} #{} {} rank {} of {}{}", sends ? "send" : "recv", sequence, sends ? "to" : "from", peer, group.name,
                     tag == 0 ? "" : fmt::format(" (tag {})", tag));
}

}  // namespace

std::string rank_list(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  return name_ranks(ranks);
}

std::string seconds_text(double seconds) { return seconds < 1 ? fmt::format("{:.0f} ms", 1000 * std::max(seconds, 0.0)) : fmt::format("{:.0f} s", seconds); }

std::string data_text(const RecordedCall& call) {
  if (call.dtype.empty() || call.dtype == "none") return {};
  return fmt::format("[{}{}] {}", fmt::join(call.shape, ", "), call.more_dims ? ", ..." : "", call.dtype);
}

std::string call_text(const RecordedCall& call, const RecordedGroup& group) {
  if (call.is_message()) return message_text(call.op == "send", call.sequence, group.members.at(call.peer), group, call.tag);
  return fmt::format("{} #{} of {}", call.op, call.sequence, group.name);
}

std::string counterpart_text(const RecordedCall& message, const RecordedGroup& group, int rank) {
  return message_text(message.op == "recv", message.sequence, rank, group, message.tag);
}

std::string site_text(const std::string& site) { return site.empty() ? "" : " (" + site + ")"; }

}  // namespace tessera::comm::flight
