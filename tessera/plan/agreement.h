#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/core/events.h"
#include "tessera/mesh/mesh.h"
#include "tessera/plan/circular_wait.h"

namespace tessera::plan {

/// Whether ranks that share a group would ask it for the same: what a dry run of one rank of each class recorded, compared. A rank that makes one call more
/// than another waits for ever in the real run; here it is a sentence.
///
///   collectives   of a group: op, elements and dtype of the whole, root, in this order, alike on all members (of an uneven all_to_all op and dtype)
///   messages      what a rank sends to another under a tag is what that one receives, where a class has one place in the group, so that peers are known
///   waits         of all groups together: no ranks wait in a circle, each in a call that another begins only behind its own wait (plan/circular_wait.h)
class Agreement {
 public:
  explicit Agreement(MeshShape shape);

  /// Groups that are named by axes of `into` are of Mesh::regrouped(over, into).
  void regroup(std::vector<std::string> over, MeshShape into);

  /// A class: its ranks, all of which do what `events` says.
  void add(const std::vector<int>& ranks, const Events& events);

  /// One sentence about the first group whose members disagree, or about ranks that wait in a circle, with their call sites; empty where all would meet.
  std::string first_disagreement() const;

 private:
  struct Asked {
    uint32_t what = 0;  ///< index in texts_
    uint32_t site = 0;  ///< index in sites_
  };
  using Calls = std::vector<Asked>;
  /// Tag, and the places of sender and receiver in the group.
  using Line = std::tuple<int, int, int>;
  struct Part {
    int64_t bytes = 0;
    uint32_t site = 0;
  };
  struct Messages {
    std::map<Line, std::vector<Part>> sent, received;  ///< one after the other
  };
  struct Class {
    int example = 0;
    std::map<std::string, Calls> calls;
    std::map<std::string, Messages> messages;
    Errands errands;  ///< the same calls in one order, with the waits for them
  };
  /// The ranks of one name's groups: where each class has its place in them, and which classes are together in one.
  struct Meetings {
    std::string group;
    std::vector<int> place_of;  ///< by class; kNobody, or kSeveral
    std::set<std::set<int>> together;
  };

  uint32_t number_of(const CollectiveEvent& call);
  uint32_t site_of(const CollectiveEvent& call);
  /// Of every rank: its place in its group of this name, and a number that the members of one group share.
  std::pair<std::vector<int>, std::vector<int>> places_and_rows(const std::string& group) const;
  std::vector<Meetings> meetings() const;
  std::string first_difference(const Meetings& of) const;
  std::string first_circle(const std::vector<Meetings>& all) const;
  std::string compare_calls(const std::string& group, const Class& a, const Class& b) const;
  std::string compare_messages(const std::string& group, const Class& a, int place_of_a, const Class& b, int place_of_b) const;

  MeshShape shape_;
  std::vector<std::string> over_;  ///< axes that are regrouped
  MeshShape into_;
  std::vector<Class> classes_;
  std::vector<int> class_of_;  ///< by rank
  std::map<std::tuple<std::string, int, int64_t, int>, uint32_t> numbers_;
  std::vector<std::string> texts_;
  std::map<std::string, uint32_t> site_numbers_;
  std::vector<std::string> sites_;  ///< " (layers.0.attention)", or nothing
};

}  // namespace tessera::plan
