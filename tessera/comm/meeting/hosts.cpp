#include "tessera/comm/meeting/hosts.h"

#include <algorithm>

namespace tessera::comm {

Hosts::Hosts(const std::vector<std::string>& host_of_member) { number(host_of_member); }
Hosts::Hosts(const std::vector<int>& host_of_member) { number(host_of_member); }

template <class Name>
void Hosts::number(const std::vector<Name>& host_of_member) {
  std::vector<Name> seen;
  for (const auto& name : host_of_member) {
    const int host = static_cast<int>(std::find(seen.begin(), seen.end(), name) - seen.begin());
    if (host == count()) {
      seen.push_back(name);
      members_.emplace_back();
    }
    local_rank_.push_back(static_cast<int>(members_[host].size()));
    members_[host].push_back(size());
    host_.push_back(host);
  }
}

int Hosts::most_members() const {
  size_t most = 0;
  for (const auto& members : members_) most = std::max(most, members.size());
  return static_cast<int>(most);
}

bool Hosts::even() const {
  return std::all_of(members_.begin(), members_.end(), [&](const auto& members) { return members.size() == members_[0].size(); });
}

std::vector<int> Hosts::across(int local_rank) const {
  std::vector<int> ranks;
  for (const auto& members : members_) ranks.push_back(members[local_rank]);
  return ranks;
}

}  // namespace tessera::comm
