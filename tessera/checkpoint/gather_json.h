#pragma once

#include <functional>
#include <source_location>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/comm/group.h"

namespace tessera::checkpoint {

/// Every rank's `mine`, by rank. Collective; the group must carry CPU tensors. Traffic: one all-gather of 8 bytes, one of the longest text from each rank.
/// `place` tells one exchange from another: ranks that have come to different ones, as after a collective that one of them left out, would take what is said of
/// one thing for another. Throws CommError for that, and for what arrives otherwise than it was sent, before anything of it is used.
std::vector<nlohmann::json> gather_json(const comm::Group& group, const nlohmann::json& mine,
                                        const std::source_location& place = std::source_location::current());

/// Runs `work` on every rank and gathers what it returns. Where it throws on any rank, every rank throws Error naming the first such rank and its reason, after
/// all have ended.
std::vector<nlohmann::json> together(const comm::Group& group, const std::function<nlohmann::json()>& work,
                                     const std::source_location& place = std::source_location::current());

}  // namespace tessera::checkpoint
