#pragma once

#include <functional>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/comm/group.h"

namespace tessera::checkpoint {

/// Every rank's `mine`, by rank. Collective; the group must carry CPU tensors. Traffic: one all-gather of 8 bytes, one of the longest text from each rank.
std::vector<nlohmann::json> gather_json(const comm::Group& group, const nlohmann::json& mine);

/// Runs `work` on every rank and gathers what it returns. Where it throws on any rank, every rank throws Error naming the first such rank and its reason, after
/// all have ended.
std::vector<nlohmann::json> together(const comm::Group& group, const std::function<nlohmann::json()>& work);

}  // namespace tessera::checkpoint
