#include "tessera/comm/backends/shm/core/communicator.h"

#include <cstring>
#include <string>

// What every operation shares: rounds, who is late, and whether all ranks mean the same call. The signature lies in the line that is read anyway, so the check
// costs nothing, and no byte of a peer that is elsewhere in its program is ever taken for data. A peer's counter is a line that the peer writes, so each look
// may be a cache miss: `seen_` keeps what was read, and most waits read nothing. Counters wrap around; their differences do not.

namespace tessera::comm::shm {

Communicator::Communicator(std::shared_ptr<Session> session, std::shared_ptr<Arena> arena)
    : session_(std::move(session)),
      arena_(std::move(arena)),
      views_(*session_),
      rank_(session_->rank()),
      n_(session_->size()),
      mapped_(static_cast<size_t>(n_)),
      everybody_(static_cast<size_t>(n_), true),
      seen_(static_cast<size_t>(n_)),
      peers_(static_cast<size_t>(n_)),
      sources_(static_cast<size_t>(n_)) {}

// [op 8][type 8][reduction 4][root 12 bits][size 32 bits]. A size of 4 GiB and more is mixed into the low bits, and so not shown right.
uint64_t Communicator::sign(Operation op, size_t bytes, int root, Type type, Reduction reduction) {
  const uint64_t size = (bytes ^ ((bytes >> 32) * 0x9e3779b1u)) & 0xffffffffu;
  return uint64_t{static_cast<uint8_t>(op)} << 56 | uint64_t{static_cast<uint8_t>(type)} << 48 | uint64_t{static_cast<uint8_t>(reduction)} << 44 |
         (static_cast<uint64_t>(root) & 0xfffu) << 32 | size;
}

std::string Communicator::describe(uint64_t signature) {
  const auto op = static_cast<Operation>(signature >> 56);
  std::string text(to_string(op));
  if (op == Operation::AllReduce || op == Operation::Reduce || op == Operation::ReduceScatter) {
    text += " (" + std::string(to_string(static_cast<Reduction>((signature >> 44) & 0xfu))) + " of " +
            std::string(name_of(static_cast<Type>((signature >> 48) & 0xffu))) + ")";
  }
  if (op != Operation::Barrier && op != Operation::AllToAll) text += " of " + std::to_string(signature & 0xffffffffu) + " bytes";
  if (op == Operation::Reduce || op == Operation::Broadcast || op == Operation::Gather || op == Operation::Scatter)
    text += " with root " + std::to_string((signature >> 32) & 0xfffu);
  return text;
}

void Communicator::await(int rank, uint32_t round) {
  auto& seen = seen_[static_cast<size_t>(rank)];
  if (rank == rank_ || static_cast<int32_t>(seen - round) >= 0) return;
  auto& event = session_->control(rank).arrived;
  session_->await(
      event, [&] { return has_arrived(rank, round); },
      [&] {
        std::vector<int> late;
        for (int peer = 0; peer < n_; ++peer) {
          if (!has_arrived(peer, round)) late.push_back(peer);
        }
        return late;
      });
  seen = event.value.load(std::memory_order_acquire);
}

void Communicator::reserve_large() {
  if (large_reserved_) return;
  const auto& layout = session_->layout();
  session_->reserve(layout.large_at(rank_, 0), 2 * layout.large_slot);
  large_reserved_ = true;
}

void Communicator::write_header(uint64_t signature, const void* data) {
  auto& own = header(rank_);
  own.signature = signature;
  own.place = Place::Private;
  if (session_->one_process()) {
    own.place = Place::Address;
    own.address = reinterpret_cast<uint64_t>(data);
  } else if (const auto offset = arena_ && arenas_are_read_ ? arena_->offset_of(data) : std::nullopt) {
    own.place = Place::Arena;
    own.address = *offset;
  }
}

void Communicator::check_signature(int rank, uint64_t signature) const {
  const auto other = header(rank).signature;
  if (other == signature) [[likely]]
    return;
  session_->fail(session_->name_of(rank) + " calls " + describe(other) + " where rank " + std::to_string(rank_) + " calls " + describe(signature));
}

void Communicator::enter_small(uint64_t signature, const void* data, size_t bytes) {
  session_->check_sound();
  begin_round();
  header(rank_).signature = signature;
  if (bytes > 0) std::memcpy(small(rank_) + kHeader, data, bytes);
  arrive();
}

const std::byte* Communicator::await_small(int rank, uint64_t signature) {
  await(rank, round_);
  check_signature(rank, signature);
  return small(rank) + kHeader;
}

bool Communicator::find_peers(uint64_t signature, const std::vector<bool>& of) {
  for (int rank = 0; rank < n_; ++rank) {
    if (of[static_cast<size_t>(rank)] && header(rank).place == Place::Private) return false;
  }
  std::vector<size_t> fresh;  // arenas that have not been named before
  bool all_found = true;
  for (int rank = 0; rank < n_; ++rank) {
    const auto r = static_cast<size_t>(rank);
    const auto& other = header(rank);
    if (!of[r]) continue;
    if (other.place == Place::Address) {
      peers_[r] = reinterpret_cast<std::byte*>(other.address);
      continue;
    }
    if (!mapped_[r]) fresh.push_back(r);
    try {
      peers_[r] = (rank == rank_ ? arena_->data() : views_.of(rank)) + other.address;
    } catch (const std::exception&) {  // out of addresses, descriptors or memory: of this rank alone, until the others are told
      all_found = false;
    }
  }
  if (fresh.empty()) return true;
  enter_small(signature, &all_found, sizeof all_found);
  for (int rank = 0; rank < n_; ++rank) {
    bool found = false;
    std::memcpy(&found, await_small(rank, signature), sizeof found);
    all_found &= found;
  }
  for (const auto r : fresh) mapped_[r] = all_found;
  arenas_are_read_ = all_found;
  if (!all_found) views_.clear();
  return all_found;
}

bool Communicator::exchange(uint64_t signature, const void* data) {
  session_->check_sound();
  begin_round();
  write_header(signature, data);
  arrive();
  await_all();
  for (int rank = 0; rank < n_; ++rank) check_signature(rank, signature);
  return find_peers(signature, everybody_);
}

void Communicator::barrier() {
  const auto signature = sign(Operation::Barrier, 0);
  enter_small(signature, nullptr, 0);
  for (int rank = 0; rank < n_; ++rank) await_small(rank, signature);
}

}  // namespace tessera::comm::shm
