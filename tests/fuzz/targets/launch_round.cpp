#include "tessera/launch/round.h"
#include "tests/fuzz/target.h"

/// What agents find in a store: another program may have written there. A round that is read can be decided on by a member, by one that waits and by a
/// stranger.
TESSERA_FUZZ_TARGET(launch_round) {
  using namespace tessera;
  launch::Round round;
  if (!fuzz::accepts("round", [&] { round = launch::read_round(std::string(input)); })) return;
  fuzz::expect(launch::read_round(launch::write_round(round)) == round, "a round changes when it is written");

  std::vector<launch::Node> selves{{.id = "stranger", .address = "elsewhere"}};
  std::map<std::string, launch::Peer> peers;
  for (const auto* list : {&round.nodes, &round.waiting}) {
    for (const auto& node : *list) peers[node.id] = {}, selves.push_back(node);
  }
  const launch::Rules rules{.min_nodes = 1, .max_nodes = 4, .max_restarts = 1, .place = "host:1"};
  for (const auto& node : selves) {
    auto others = peers;
    others.erase(node.id);
    launch::decide(round, others, {.node = node, .waited_s = 1000, .unchanged_s = 10, .took_part = true}, rules);
    launch::ranks_of(round, node.id);
    if (const auto place = launch::place_of(round, node.id)) {
      fuzz::expect(place->first_rank >= 0 && place->first_rank < place->world_size, "ranks from ", place->first_rank, " of ", place->world_size);
    }
  }
}
