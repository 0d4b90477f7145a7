#include "tessera/checkpoint/gather_json.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/json_text.h"

namespace tessera::checkpoint {

std::vector<nlohmann::json> gather_json(const comm::Group& group, const nlohmann::json& mine) {
  if (group.size() == 1) return {mine};
  // A path in an error message may hold any bytes; a rank that threw here would leave the others waiting.
  const std::string text = json_text(mine);
  const auto lengths = at::empty({group.size()}, at::device(at::kCPU).dtype(at::kLong));
  comm::all_gather(group, lengths, at::full({1}, static_cast<int64_t>(text.size()), lengths.options()));
  const int64_t longest = lengths.max().item<int64_t>();

  const auto padded = at::zeros({longest}, at::device(at::kCPU).dtype(at::kByte));
  std::memcpy(padded.mutable_data_ptr<uint8_t>(), text.data(), text.size());
  const auto texts = at::empty({group.size() * longest}, padded.options());
  comm::all_gather(group, texts, padded);

  std::vector<nlohmann::json> all;
  for (int rank = 0; rank < group.size(); ++rank) {
    const uint8_t* const begin = texts.const_data_ptr<uint8_t>() + rank * longest;
    const int64_t length = lengths[rank].item<int64_t>();
    auto told = nlohmann::json::parse(begin, begin + std::clamp<int64_t>(length, 0, longest), nullptr, /*allow_exceptions=*/false);
    if (told.is_discarded()) {
      throw CommError(detail::concat("what rank ", rank, " of group ", group.name(), " says of its state arrived damaged (", length, " bytes that are no JSON)"));
    }
    all.push_back(std::move(told));
  }
  return all;
}

std::vector<nlohmann::json> together(const comm::Group& group, const std::function<nlohmann::json()>& work) {
  nlohmann::json outcome;
  try {
    outcome["done"] = work();
  } catch (const std::exception& error) {
    outcome["error"] = error.what();
  }
  std::vector<nlohmann::json> results;
  for (int rank = 0; auto& each : gather_json(group, outcome)) {
    if (!each.is_object()) throw CommError(detail::concat("what rank ", rank, " of group ", group.name(), " says of its work arrived damaged"));
    if (each.contains("error")) throw Error(detail::concat("rank ", rank, ": ", each["error"].get<std::string>()));
    results.push_back(std::move(each["done"]));
    ++rank;
  }
  return results;
}

}  // namespace tessera::checkpoint
