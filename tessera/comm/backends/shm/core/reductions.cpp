#include <algorithm>
#include <cstring>

#include "tessera/comm/backends/shm/core/communicator.h"

// all_reduce, reduce, reduce_scatter. An element belongs to one rank, which adds all ranks' values of it in rank order; how elements are dealt then changes who
// adds, never the bits. The obvious order of a staged chunk, reduce, wait, hand out, would wait twice a chunk: the result travels in the next round's slot
// instead, behind the shares of the next chunk, for one round more in all. Blocks are small enough that a sum is written to its n places while it is in the
// first cache.

namespace tessera::comm::shm {
namespace {

constexpr size_t kOneShotReads = 64 << 10;  ///< bytes that a rank reads of its peers' slots at most before sharing the work is worth a second wait
constexpr size_t kBlock = 16 << 10;         ///< bytes that are written twice while they are in the first cache
constexpr size_t kGrain = 64;               ///< elements: a share begins at a line of its own in every type

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

/// Elements dealt over the ranks, all shares but the last ones of `length`.
struct Shares {
  Shares(size_t count, int ranks) : count(count), length(divide_up(divide_up(count, static_cast<size_t>(ranks)), kGrain) * kGrain) {}
  size_t begin(int rank) const { return std::min(count, length * static_cast<size_t>(rank)); }
  size_t size(int rank) const { return std::min(count, length * static_cast<size_t>(rank + 1)) - begin(rank); }
  size_t count, length;
};

/// Parts of a long row of elements that pass through a slot one after the other, as even as can be.
struct Chunks {
  Chunks(size_t count, size_t most)
      : count(count), number(divide_up(count, most)), length(number == 0 ? 0 : divide_up(divide_up(count, number), kGrain) * kGrain) {
    number = length == 0 ? 0 : divide_up(count, length);
  }
  size_t begin(size_t chunk) const { return chunk * length; }
  size_t size(size_t chunk) const { return std::min(length, count - begin(chunk)); }
  size_t count, number, length;
};

}  // namespace

void Communicator::all_reduce(void* data, size_t count, Type type, Reduction reduction) {
  reduce_any(data, count, type, reduction, -1, sign(Operation::AllReduce, count * size_of(type), 0, type, reduction));
}

void Communicator::reduce(void* data, size_t count, Type type, Reduction reduction, int root) {
  reduce_any(data, count, type, reduction, root, sign(Operation::Reduce, count * size_of(type), root, type, reduction));
}

void Communicator::reduce_any(void* data, size_t count, Type type, Reduction reduction, int root, uint64_t signature) {
  const auto bytes = count * size_of(type);
  if (bytes == 0) return;
  if (bytes <= kSmall && bytes * static_cast<size_t>(n_ - 1) <= kOneShotReads) {
    enter_small(signature, data, bytes);
    if (root >= 0 && rank_ != root) return;
    for (int rank = 0; rank < n_; ++rank) sources_[static_cast<size_t>(rank)] = rank == rank_ ? data : await_small(rank, signature);
    reduce_loop(type, reduction)(data, sources_.data(), n_, count);
    return;
  }
  if (exchange(signature, data)) {
    direct_reduce(count, type, reduction, root);
  } else {
    staged_reduce(static_cast<std::byte*>(data), count, type, reduction, root);
  }
}

// Each rank adds its share of all buffers and writes it to all of them, or to the root's.
void Communicator::direct_reduce(size_t count, Type type, Reduction reduction, int root) {
  const auto loop = reduce_loop(type, reduction);
  const auto width = size_of(type);
  const Shares shares(count, n_);
  const auto end = (shares.begin(rank_) + shares.size(rank_)) * width;
  const int first = root >= 0 ? root : rank_;
  for (auto at = shares.begin(rank_) * width; at < end; at += kBlock) {
    const auto bytes = std::min(kBlock, end - at);
    for (int rank = 0; rank < n_; ++rank) sources_[static_cast<size_t>(rank)] = peers_[static_cast<size_t>(rank)] + at;
    // Written over one of the operands: nobody but this rank reads or writes these elements, in any of the buffers.
    auto* const sum = peers_[static_cast<size_t>(first)] + at;
    loop(sum, sources_.data(), n_, bytes / width);
    for (int rank = 0; rank < n_; ++rank) {
      if (root < 0 && rank != first) std::memcpy(peers_[static_cast<size_t>(rank)] + at, sum, bytes);
    }
  }
  finish_direct();
}

// A large slot holds the n shares of a chunk, of which the peers read one each, and behind them this rank's reduced share of the chunk before. So one round
// reduces a chunk, hands out the last one's result, and stages the next.
void Communicator::staged_reduce(std::byte* data, size_t count, Type type, Reduction reduction, int root) {
  reserve_large();
  const auto loop = reduce_loop(type, reduction);
  const auto width = size_of(type);
  const auto most = session_->layout().large_slot / static_cast<size_t>(n_ + 1) / (width * kGrain) * kGrain * static_cast<size_t>(n_);
  const Chunks chunks(count, most);
  const auto results = Shares(chunks.length, n_).length * static_cast<size_t>(n_) * width;
  const bool receives = root < 0 || root == rank_;
  for (size_t chunk = 0; chunk <= chunks.number; ++chunk) {
    const bool reduces = chunk < chunks.number;
    begin_round();
    auto* const values = data + chunks.begin(chunk) * width;
    const Shares shares(reduces ? chunks.size(chunk) : 0, n_);
    for (int rank = 0; rank < n_; ++rank) {
      if (rank != rank_) std::memcpy(large(rank_) + shares.begin(rank) * width, values + shares.begin(rank) * width, shares.size(rank) * width);
    }
    arrive();
    await_all();
    const auto own = shares.begin(rank_) * width, end = own + shares.size(rank_) * width;
    for (auto at = own; at < end; at += kBlock) {
      const auto bytes = std::min(kBlock, end - at);
      for (int rank = 0; rank < n_; ++rank) sources_[static_cast<size_t>(rank)] = (rank == rank_ ? values : large(rank)) + at;
      auto* const sum = next_large() + results + (at - own);
      loop(sum, sources_.data(), n_, bytes / width);
      if (receives) std::memcpy(values + at, sum, bytes);
    }
    if (chunk == 0 || !receives) continue;
    const Shares before(chunks.size(chunk - 1), n_);
    for (int rank = 0; rank < n_; ++rank) {
      auto* const to = data + (chunks.begin(chunk - 1) + before.begin(rank)) * width;
      if (rank != rank_) std::memcpy(to, large(rank) + results, before.size(rank) * width);
    }
  }
}

void Communicator::reduce_scatter(void* out, const void* in, size_t count, Type type, Reduction reduction) {
  const auto bytes = count * size_of(type), whole = bytes * static_cast<size_t>(n_);
  if (bytes == 0) return;
  const auto signature = sign(Operation::ReduceScatter, whole, 0, type, reduction);
  const auto own = bytes * static_cast<size_t>(rank_);
  const auto* const values = static_cast<const std::byte*>(in);
  if (whole <= kSmall) {
    enter_small(signature, in, whole);
    for (int rank = 0; rank < n_; ++rank) sources_[static_cast<size_t>(rank)] = (rank == rank_ ? values : await_small(rank, signature)) + own;
    reduce_loop(type, reduction)(out, sources_.data(), n_, count);
  } else if (exchange(signature, in)) {
    for (int rank = 0; rank < n_; ++rank) sources_[static_cast<size_t>(rank)] = peers_[static_cast<size_t>(rank)] + own;
    reduce_loop(type, reduction)(out, sources_.data(), n_, count);
    finish_direct();
  } else {
    staged_reduce_scatter(static_cast<std::byte*>(out), values, count, type, reduction);
  }
}

void Communicator::staged_reduce_scatter(std::byte* out, const std::byte* in, size_t count, Type type, Reduction reduction) {
  reserve_large();
  const auto width = size_of(type);
  const Chunks chunks(count, session_->layout().large_slot / static_cast<size_t>(n_) / (width * kGrain) * kGrain);
  for (size_t chunk = 0; chunk < chunks.number; ++chunk) {
    const auto at = chunks.begin(chunk) * width, bytes = chunks.size(chunk) * width;
    begin_round();
    for (int rank = 0; rank < n_; ++rank) {
      if (rank != rank_) std::memcpy(large(rank_) + static_cast<size_t>(rank) * bytes, in + static_cast<size_t>(rank) * count * width + at, bytes);
    }
    arrive();
    await_all();
    const auto own = static_cast<size_t>(rank_);
    for (int rank = 0; rank < n_; ++rank) sources_[static_cast<size_t>(rank)] = rank == rank_ ? in + own * count * width + at : large(rank) + own * bytes;
    reduce_loop(type, reduction)(out + at, sources_.data(), n_, bytes / width);
  }
}

}  // namespace tessera::comm::shm
