#pragma once

#include <span>

#include "tessera/comm/backends/shm/core/arena.h"
#include "tessera/comm/backends/shm/core/reduce.h"
#include "tessera/comm/backends/shm/core/session.h"

/// The collectives of ranks that share memory.
///
/// An operation is a number of rounds. In a round a rank writes its slot, says that it has arrived, waits for those whose slots it needs, and reads them. A
/// rank has two slots and takes them in turn: before it overwrites one, all must have arrived in the round after, so they have read it. That is the one wait of
/// a round, and after a round's reads there is none.
///   small           data lies in the slots: one round, n S bytes read per rank
///   direct          ranks whose buffers all can be read in place (threads, Arena) exchange addresses, work, and wait once more
///   staged          chunks of a slot's size that stay in the cache; reading a chunk and writing the next overlap with the peers' doing so
/// Reductions deal the elements over the ranks, each of whom adds its share in rank order. So the bits of an element are those of r0 + r1 + r2 + ..., whatever
/// the path, the chunk and what else is reduced beside it.
///
/// Bytes that a rank moves for S bytes, n ranks: all_reduce direct 2 S (S/n from each rank read, and to each written); staged 4 S (n-1)/n + 2 S/n, of which all
/// but 2 S stay in the cache.
namespace tessera::comm::shm {

class Communicator {
 public:
  /// `arena`: this rank's memory that peers can map; may be null.
  Communicator(std::shared_ptr<Session> session, std::shared_ptr<Arena> arena);

  // One thread at a time; all ranks the same calls with the same sizes. Failure where a peer's call differs, and as Session::await.

  void all_reduce(void* data, size_t count, Type type, Reduction reduction);
  /// The result at `root` alone; what others hold afterwards is undefined.
  void reduce(void* data, size_t count, Type type, Reduction reduction, int root);
  /// out (count elements, may be this rank's part of `in`) <- this rank's part of the reduced `in` (n * count).
  void reduce_scatter(void* out, const void* in, size_t count, Type type, Reduction reduction);
  /// out (n * bytes, may hold `in` in its place) <- the ranks' `in`.
  void all_gather(void* out, const void* in, size_t bytes);
  void broadcast(void* data, size_t bytes, int root);
  /// Root: outs[r] <- rank r's `in`. Others: outs is not read.
  void gather(std::span<void* const> outs, const void* in, size_t bytes, int root);
  /// out <- root's ins[this rank]. Others: ins is not read.
  void scatter(void* out, std::span<const void* const> ins, size_t bytes, int root);
  /// in_bytes[r] of `in`, which lie in rank order, go to rank r; out_bytes[r] come from it.
  void all_to_all(void* out, const void* in, std::span<const size_t> out_bytes, std::span<const size_t> in_bytes);
  void barrier();

 private:
  enum class Place : uint32_t { Private, Address, Arena };

  /// First in each small slot of an operation's first round.
  struct Header {
    uint64_t signature;  ///< op, type, reduction, root and size: equal at all ranks
    uint64_t address;    ///< of what peers may read: in this process or from the arena's start
    Place place;
  };
  static constexpr size_t kHeader = 64;
  static constexpr size_t kSmall = SegmentMap::kSmallSlot - kHeader;

  static uint64_t sign(Operation op, size_t bytes, int root = 0, Type type = {}, Reduction reduction = {});
  static std::string describe(uint64_t signature);

  // A round: begin, write small() or large(), arrive, await, read.
  void begin_round() {
    await_all(round_);
    ++round_;
  }
  void arrive() { session_->control(rank_).arrived.set(round_); }
  void await(int rank, uint32_t round);
  void await_all(uint32_t round) {
    for (int rank = 0; rank < n_; ++rank) await(rank, round);
  }
  void await_all() { await_all(round_); }
  bool has_arrived(int rank, uint32_t round) const {
    return static_cast<int32_t>(session_->control(rank).arrived.value.load(std::memory_order_acquire) - round) >= 0;
  }
  std::byte* small(int rank) const { return session_->at(session_->layout().small_at(rank, round_)); }
  std::byte* large(int rank) const { return session_->at(session_->layout().large_at(rank, round_)); }
  std::byte* next_large() const { return session_->at(session_->layout().large_at(rank_, round_ + 1)); }
  void reserve_large();

  /// Begins an operation whose data lies in the slots: enters with a copy of these bytes.
  void enter_small(uint64_t signature, const void* data, size_t bytes);
  /// Waits for the rank's slot and returns its data.
  const std::byte* await_small(int rank, uint64_t signature);
  /// The first round of larger ones: says where `data` lies; true where every rank's can be read in place, at peers_.
  bool exchange(uint64_t signature, const void* data);
  /// Whether what the headers of the ranks in `of` name can be read in place by all ranks, each of whom asks this of the same ones; at peers_ then. The first
  /// time that an arena is named takes another round, in which the ranks say whether they could map it: where one could not, none relies on arenas any more.
  bool find_peers(uint64_t signature, const std::vector<bool>& of);
  Header& header(int rank) const { return *reinterpret_cast<Header*>(small(rank)); }
  void write_header(uint64_t signature, const void* data);
  void check_signature(int rank, uint64_t signature) const;
  /// Peers are done with this rank's buffers, and it with theirs.
  void finish_direct() {
    begin_round();
    arrive();
    await_all();
  }

  void direct_reduce(size_t count, Type type, Reduction reduction, int root);
  void staged_reduce(std::byte* data, size_t count, Type type, Reduction reduction, int root);
  void reduce_any(void* data, size_t count, Type type, Reduction reduction, int root, uint64_t signature);
  void staged_reduce_scatter(std::byte* out, const std::byte* in, size_t count, Type type, Reduction reduction);
  void staged_all_to_all(std::byte* out, const std::byte* in, std::span<const size_t> out_bytes, std::span<const size_t> in_bytes,
                         const std::vector<bool>& waiting, size_t longest);

  std::shared_ptr<Session> session_;
  std::shared_ptr<Arena> arena_;
  ArenaViews views_;
  const int rank_, n_;
  uint32_t round_ = 0;
  bool large_reserved_ = false;
  bool arenas_are_read_ = true;  ///< alike on all ranks
  std::vector<bool> mapped_;     ///< whose arenas all ranks have mapped; alike on all ranks
  const std::vector<bool> everybody_;
  std::vector<uint32_t> seen_;     ///< rounds in which each rank is known to have arrived
  std::vector<std::byte*> peers_;  ///< of the current operation
  std::vector<const void*> sources_;
};

}  // namespace tessera::comm::shm
