#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::plan {

/// What meets in order: the collectives of a group, or the messages between two places of it under a tag, as one end has them.
struct Lane {
  enum class Way : uint8_t { Collective, Sent, Received };
  std::string group{};
  Way way = Way::Collective;
  int tag = 0, from = 0, to = 0;  ///< of messages
  auto operator<=>(const Lane&) const = default;
};

/// The calls of a rank in the order in which it begins them, and between them its waits for those that are in flight.
class Errands {
 public:
  struct Call {
    uint32_t lane = 0, number = 0;  ///< of its lane, from 0
  };
  /// `text`: op, group and call site, for the sentence.
  Call begin(const Lane& lane, const std::string& text);
  void wait(const Call& call);

 private:
  friend class CircularWait;
  struct Moment {
    Call call{};
    bool waits = false;
  };
  std::map<Lane, uint32_t> lanes_;
  std::vector<uint32_t> begun_;               ///< by lane
  std::vector<std::vector<uint32_t>> texts_;  ///< by lane and number: index in names_
  std::map<std::string, uint32_t> known_;
  std::vector<std::string> names_;
  std::vector<Moment> moments_;
};

/// Finds classes of ranks that wait for each other in a circle, across all groups, by carrying their lists out: a wait for a call ends once all who take part
/// have begun it (a message: its other end). Of ranks that are alike all go on together, and a class waits for all classes that any of its ranks meets, so what
/// is found to end does end.
/// Cost: some 100 ns a call and partner.
class CircularWait {
 public:
  /// The next class, by the rank that is named.
  void add(int rank, const Errands& errands);
  /// Class `a`, whose ranks have `place_of_a` in their groups of this name (below zero: several), and `b` are in one of them.
  void meet(const std::string& group, int a, int place_of_a, int b, int place_of_b);
  /// One sentence with the call sites; empty where all come to their end.
  std::string find();

 private:
  struct Partner {
    int who = 0;
    uint32_t lane = 0;
  };
  struct One {
    int rank = 0;
    const Errands* errands = nullptr;
    std::vector<std::vector<Partner>> partners;  ///< by lane
    std::vector<uint32_t> begun;
    size_t at = 0;
  };
  /// The first that has not begun what `one` waits for; null where it need not wait.
  const Partner* missing(const One& one) const;
  bool advance(One& one);
  std::string circle_from(int one) const;

  std::vector<One> all_;
};

}  // namespace tessera::plan
