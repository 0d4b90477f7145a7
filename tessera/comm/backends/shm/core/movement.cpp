#include <algorithm>
#include <cstring>
#include <numeric>

#include "tessera/comm/backends/shm/core/communicator.h"

// all_gather, broadcast, gather, scatter, all_to_all: bytes that move and are not reduced. Read in place a byte is copied once; through a slot twice, but the
// slot stays in the cache. A reader waits for the rank whose slot it needs and for no other, so that a late rank holds up who needs it, and the others only
// when the slots come round. scatter knows the slots alone: its root's parts may lie anywhere, and a header names one place.

namespace tessera::comm::shm {
namespace {

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

void Communicator::all_gather(void* out, const void* in, size_t bytes) {
  if (bytes == 0) return;
  const auto signature = sign(Operation::AllGather, bytes);
  const auto part = [&](int rank) { return static_cast<std::byte*>(out) + static_cast<size_t>(rank) * bytes; };
  if (bytes <= kSmall) {
    enter_small(signature, in, bytes);
    copy_bytes(part(rank_), in, bytes);
    for (int rank = 0; rank < n_; ++rank) {
      if (rank != rank_) copy_bytes(part(rank), await_small(rank, signature), bytes);
    }
    return;
  }
  const bool direct = exchange(signature, in);
  copy_bytes(part(rank_), in, bytes);
  if (direct) {
    for (int step = 1; step < n_; ++step) {  // each begins at another peer, so that no memory is asked by all
      const int rank = (rank_ + step) % n_;
      copy_bytes(part(rank), peers_[static_cast<size_t>(rank)], bytes);
    }
    return finish_direct();
  }
  reserve_large();
  const auto chunk = session_->layout().large_slot;
  for (size_t at = 0; at < bytes; at += chunk) {
    const auto length = std::min(chunk, bytes - at);
    begin_round();
    copy_bytes(large(rank_), static_cast<const std::byte*>(in) + at, length);
    arrive();
    for (int step = 1; step < n_; ++step) {
      const int rank = (rank_ + step) % n_;
      await(rank, round_);
      copy_bytes(part(rank) + at, large(rank), length);
    }
  }
}

void Communicator::broadcast(void* data, size_t bytes, int root) {
  if (bytes == 0) return;
  const auto signature = sign(Operation::Broadcast, bytes, root);
  const bool sends = rank_ == root;
  if (bytes <= kSmall) {
    enter_small(signature, data, sends ? bytes : 0);
    if (!sends) copy_bytes(data, await_small(root, signature), bytes);
    return;
  }
  if (exchange(signature, data)) {
    copy_bytes(data, peers_[static_cast<size_t>(root)], bytes);
    return finish_direct();
  }
  if (sends) reserve_large();
  const auto chunk = session_->layout().large_slot;
  for (size_t at = 0; at < bytes; at += chunk) {
    const auto length = std::min(chunk, bytes - at);
    begin_round();
    if (sends) copy_bytes(large(rank_), static_cast<std::byte*>(data) + at, length);
    arrive();
    if (sends) continue;
    await(root, round_);
    copy_bytes(static_cast<std::byte*>(data) + at, large(root), length);
  }
}

void Communicator::gather(std::span<void* const> outs, const void* in, size_t bytes, int root) {
  if (bytes == 0) return;
  const auto signature = sign(Operation::Gather, bytes, root);
  const bool receives = rank_ == root;
  if (receives) copy_bytes(outs[static_cast<size_t>(rank_)], in, bytes);
  if (bytes <= kSmall) {
    enter_small(signature, in, receives ? 0 : bytes);
    for (int rank = 0; receives && rank < n_; ++rank) {
      if (rank != rank_) copy_bytes(outs[static_cast<size_t>(rank)], await_small(rank, signature), bytes);
    }
    return;
  }
  if (exchange(signature, in)) {
    for (int rank = 0; receives && rank < n_; ++rank) {
      if (rank != rank_) copy_bytes(outs[static_cast<size_t>(rank)], peers_[static_cast<size_t>(rank)], bytes);
    }
    return finish_direct();
  }
  if (!receives) reserve_large();
  const auto chunk = session_->layout().large_slot;
  for (size_t at = 0; at < bytes; at += chunk) {
    const auto length = std::min(chunk, bytes - at);
    begin_round();
    if (!receives) copy_bytes(large(rank_), static_cast<const std::byte*>(in) + at, length);
    arrive();
    for (int rank = 0; receives && rank < n_; ++rank) {
      if (rank == rank_) continue;
      await(rank, round_);
      copy_bytes(static_cast<std::byte*>(outs[static_cast<size_t>(rank)]) + at, large(rank), length);
    }
  }
}

void Communicator::scatter(void* out, std::span<const void* const> ins, size_t bytes, int root) {
  if (bytes == 0) return;
  const auto signature = sign(Operation::Scatter, bytes, root);
  const bool sends = rank_ == root;
  const auto& own = static_cast<size_t>(rank_);
  if (sends) copy_bytes(out, ins[own], bytes);
  session_->check_sound();
  // The parts may lie anywhere, so they pass through the slots, a piece of each at a time.
  const auto small_piece = kSmall / static_cast<size_t>(n_), piece = session_->layout().large_slot / static_cast<size_t>(n_);
  const bool fits = bytes <= small_piece;
  if (sends && !fits) reserve_large();
  const auto stride = fits ? bytes : piece;
  for (size_t at = 0; at < bytes; at += stride) {
    const auto length = std::min(stride, bytes - at);
    const auto base = [&](int rank) { return fits ? small(rank) + kHeader : large(rank); };
    begin_round();
    header(rank_).signature = signature;
    for (int rank = 0; sends && rank < n_; ++rank) {
      if (rank != rank_)
        std::memcpy(base(rank_) + static_cast<size_t>(rank) * stride, static_cast<const std::byte*>(ins[static_cast<size_t>(rank)]) + at, length);
    }
    arrive();
    if (sends) continue;
    await_small(root, signature);
    copy_bytes(static_cast<std::byte*>(out) + at, base(root) + own * stride, length);
  }
}

// The first round says how many bytes go to whom, and where they lie. Whoever has little to send puts it behind that table.
void Communicator::all_to_all(void* out, const void* in, std::span<const size_t> out_bytes, std::span<const size_t> in_bytes) {
  const auto n = static_cast<size_t>(n_), own = static_cast<size_t>(rank_);
  const auto signature = sign(Operation::AllToAll, 0);
  const auto total = std::accumulate(in_bytes.begin(), in_bytes.end(), size_t{0});
  const auto table_bytes = n * sizeof(uint64_t), room = kSmall - table_bytes;
  const auto table = [&](int rank) { return reinterpret_cast<uint64_t*>(small(rank) + kHeader); };
  session_->check_sound();
  begin_round();
  write_header(signature, in);
  std::copy(in_bytes.begin(), in_bytes.end(), table(rank_));
  if (total <= room) copy_bytes(small(rank_) + kHeader + table_bytes, in, total);
  arrive();

  std::vector<size_t> offsets(n);  // of this rank's part in each rank's input
  std::vector<bool> waiting(n);    // ranks whose parts are still to come
  size_t longest = 0;              // part of those
  auto* to = static_cast<std::byte*>(out);
  for (int rank = 0; rank < n_; ++rank) {
    const auto r = static_cast<size_t>(rank);
    await_small(rank, signature);
    const std::span<const uint64_t> parts(table(rank), n);
    if (parts[own] != out_bytes[r]) {
      session_->fail(session_->name_of(rank) + " sends " + std::to_string(parts[own]) + " bytes in an all_to_all where rank " + std::to_string(rank_) +
                     " receives " + std::to_string(out_bytes[r]));
    }
    offsets[r] = std::accumulate(parts.begin(), parts.begin() + rank_, size_t{0});
    if (std::accumulate(parts.begin(), parts.end(), size_t{0}) <= room) {
      if (rank != rank_) copy_bytes(to, small(rank) + kHeader + table_bytes + offsets[r], out_bytes[r]);
    } else {
      waiting[r] = true;
      longest = std::max<size_t>(longest, *std::max_element(parts.begin(), parts.end()));
    }
    if (rank == rank_) copy_bytes(to, static_cast<const std::byte*>(in) + offsets[r], out_bytes[r]);
    to += out_bytes[r];
  }
  if (longest == 0) return;
  if (find_peers(signature, waiting)) {
    to = static_cast<std::byte*>(out);
    for (size_t r = 0; r < n; to += out_bytes[r++]) {
      if (waiting[r] && r != own) copy_bytes(to, peers_[r] + offsets[r], out_bytes[r]);
    }
    return finish_direct();
  }
  staged_all_to_all(static_cast<std::byte*>(out), static_cast<const std::byte*>(in), out_bytes, in_bytes, waiting, longest);
}

// A large slot holds a piece of each part.
void Communicator::staged_all_to_all(std::byte* out, const std::byte* in, std::span<const size_t> out_bytes, std::span<const size_t> in_bytes,
                                     const std::vector<bool>& waiting, size_t longest) {
  const auto n = static_cast<size_t>(n_), own = static_cast<size_t>(rank_);
  const auto piece = session_->layout().large_slot / n / 64 * 64;
  const auto length = [&](size_t bytes, size_t at) { return at < bytes ? std::min(piece, bytes - at) : 0; };
  if (waiting[own]) reserve_large();
  for (size_t at = 0; at < longest; at += piece) {
    begin_round();
    const auto* from = in;
    for (size_t r = 0; waiting[own] && r < n; from += in_bytes[r++]) {
      if (r != own) copy_bytes(large(rank_) + r * piece, from + at, length(in_bytes[r], at));
    }
    arrive();
    auto* to = out;
    for (size_t r = 0; r < n; to += out_bytes[r++]) {
      if (!waiting[r] || r == own) continue;
      await(static_cast<int>(r), round_);
      copy_bytes(to + at, large(static_cast<int>(r)) + own * piece, length(out_bytes[r], at));
    }
  }
}

}  // namespace tessera::comm::shm
