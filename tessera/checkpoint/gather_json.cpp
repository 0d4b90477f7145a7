#include "tessera/checkpoint/gather_json.h"

#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/json_text.h"

// A text travels behind its hash and that of the place that sent it, 16 digits each.

namespace tessera::checkpoint {
namespace {

constexpr int64_t kDigits = 16, kHead = 2 * kDigits;
constexpr int64_t kMost = int64_t{1} << 30;  // of a rank: more is no length that a rank has told

std::string place_text(const std::source_location& place) {
  const std::string text = detail::concat(place.function_name(), ":", place.line());
  return hash_hex(text.data(), text.size());
}

[[noreturn]] void refuse(const comm::Group& group, int rank, const std::string& problem) {
  throw CommError(detail::concat("what rank ", rank, " of group ", group.name(), " says of its state arrived damaged: ", problem));
}

nlohmann::json read_told(const comm::Group& group, int rank, std::string_view text, std::string_view here) {
  const std::string_view hash = text.substr(0, kDigits), there = text.substr(kDigits, kDigits), body = text.substr(kHead);
  if (hash != hash_hex(body.data(), body.size())) refuse(group, rank, detail::concat("its ", body.size(), " bytes are others than were sent"));
  if (there != here) {
    throw CommError(detail::concat("rank ", rank, " of group ", group.name(), " tells of something else than rank ", group.rank(),
                                   " asks for: one of them made a collective that the other did not"));
  }
  auto told = nlohmann::json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (told.is_discarded()) refuse(group, rank, detail::concat("its ", body.size(), " bytes are no JSON"));
  return told;
}

}  // namespace

std::vector<nlohmann::json> gather_json(const comm::Group& group, const nlohmann::json& mine, const std::source_location& place) {
  if (group.size() == 1) return {mine};
  // A path in an error message may hold any bytes; a rank that threw here would leave the others waiting.
  const std::string body = json_text(mine), here = place_text(place), text = hash_hex(body.data(), body.size()) + here + body;
  const auto lengths = at::zeros({group.size()}, at::device(at::kCPU).dtype(at::kLong));
  comm::all_gather(group, lengths, at::full({1}, static_cast<int64_t>(text.size()), lengths.options()));
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t length = lengths[rank].item<int64_t>();
    const bool is_mine = rank != group.rank() || length == static_cast<int64_t>(text.size());
    if (length <= kHead || length > kMost || !is_mine) refuse(group, rank, detail::concat("a text of ", length, " bytes"));
  }
  const int64_t longest = lengths.max().item<int64_t>();

  const auto padded = at::zeros({longest}, at::device(at::kCPU).dtype(at::kByte));
  std::memcpy(padded.mutable_data_ptr<uint8_t>(), text.data(), text.size());
  const auto texts = at::zeros({group.size() * longest}, padded.options());
  comm::all_gather(group, texts, padded);

  std::vector<nlohmann::json> all;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto* const begin = reinterpret_cast<const char*>(texts.const_data_ptr<uint8_t>()) + rank * longest;
    all.push_back(read_told(group, rank, {begin, static_cast<size_t>(lengths[rank].item<int64_t>())}, here));
  }
  return all;
}

std::vector<nlohmann::json> together(const comm::Group& group, const std::function<nlohmann::json()>& work, const std::source_location& place) {
  nlohmann::json outcome;
  try {
    outcome["done"] = work();
  } catch (const std::exception& error) {
    outcome["error"] = error.what();
  }
  std::vector<nlohmann::json> results;
  for (int rank = 0; auto& each : gather_json(group, outcome, place)) {
    if (each.contains("error")) throw Error(detail::concat("rank ", rank, ": ", each["error"].get<std::string>()));
    results.push_back(std::move(each["done"]));
    ++rank;
  }
  return results;
}

}  // namespace tessera::checkpoint
