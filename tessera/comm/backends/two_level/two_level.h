#pragma once

#include <memory>

#include "tessera/comm/group.h"
#include "tessera/comm/meeting/hosts.h"

namespace tessera::comm {

/// The groups of which a two-level group is made, as one rank sees them.
struct Levels {
  Hosts hosts;
  Group local;   ///< the members on this host, in group order: shared memory
  Group across;  ///< where the hosts have equally many members: those with this local rank. Else the leaders; of size 1 on other ranks
  Group flat;    ///< all members, over the network
};

/// A group whose members live on several hosts, some of them on one: fast inside a host, and between hosts no more bytes than need be.
///
/// H hosts of L members each, n = H L, S bytes. What one rank sends between hosts:
///   all_reduce      reduce-scatter inside, all-reduce of each share between those with the same local rank, all-gather inside   2 S/L (H-1)/H
///   all_gather      between those with the same local rank, then inside, host by host                                         S/L (H-1)/H
///   reduce_scatter  inside, host by host, then between those with the same local rank                                         S/L (H-1)/H
///   broadcast       inside the root's host, then leaders, then inside the others                                              S by leaders
///   reduce          to each leader, then to the leader of the root's host, who hands it on                                    S by leaders
///   barrier         inside, leaders, inside                                                                                   0
///   gather, scatter, all_to_all   flat: one message per pair, as between hosts                                                  as traffic.h says
///   send, recv      inside a host through memory, else flat
/// Where hosts have different numbers of members, shares do not match: the sums are made at each host's leader, leaders do the op among themselves with shares
/// padded to the largest host's, and spread the result inside.
///
/// Order of sums: first the members of each host, in the local engine's order (rank order), then the hosts, in the flat engine's. Every rank gets the same
/// bits. A sum of bf16 or fp16 is rounded once per host, and then as the flat engine rounds. An all_reduce of less than 16 KiB skips the shares: each
/// host's sum is made by all its members, and each goes between hosts whole.
///
/// The flat group is always connected (n - 1 connections per rank), because sends cannot wait for others to come. Scratch: S/L; where the members of a host
/// are not neighbors in the group, a copy of their blocks; S where hosts are uneven (all_gather, reduce_scatter). Collectives that are not flat run in order on
/// a thread of the group, or on the caller's where it waits at once; abort, shutdown and timeouts are those of the groups inside.
std::shared_ptr<Engine> make_two_level_engine(const GroupInfo& group, Levels levels);

}  // namespace tessera::comm
