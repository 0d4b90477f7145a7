#pragma once

#include <string>
#include <vector>

namespace tessera::comm {

/// Which member of a group lives on which host. Hosts are numbered by their first member, members of a host keep the group's order: every member derives the
/// same value from the same list.
class Hosts {
 public:
  /// The host of each member, by any name that is equal where the host is.
  explicit Hosts(const std::vector<std::string>& host_of_member);
  explicit Hosts(const std::vector<int>& host_of_member);

  int count() const { return static_cast<int>(members_.size()); }
  int size() const { return static_cast<int>(host_.size()); }
  /// Group ranks of the host's members, ascending; the first is its leader.
  const std::vector<int>& members(int host) const { return members_[host]; }
  int leader(int host) const { return members_[host][0]; }
  int host(int member) const { return host_[member]; }
  const std::vector<int>& host_of_members() const { return host_; }
  /// Place of the member among those of its host.
  int local_rank(int member) const { return local_rank_[member]; }
  /// Whether the host's members follow each other in the group, as launchers deal ranks: then their blocks lie side by side.
  bool adjacent(int host) const { return members_[host].back() - members_[host].front() + 1 == static_cast<int>(members_[host].size()); }
  int most_members() const;
  /// Whether all hosts have the same number of members: those with one local rank then form a group of one per host.
  bool even() const;
  /// One member per host, in host order: those with this local rank. The hosts must have as many.
  std::vector<int> across(int local_rank) const;

 private:
  template <class Name>
  void number(const std::vector<Name>& host_of_member);

  std::vector<int> host_;
  std::vector<int> local_rank_;
  std::vector<std::vector<int>> members_;
};

}  // namespace tessera::comm
