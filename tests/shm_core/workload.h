#pragma once

#include <algorithm>

#include "tests/shm_core/ranks.h"

/// What every group has to do right, whatever its ranks are. Values are such that another order of adding gives other bits.
namespace tessera::comm::shm {

// One element, less than a line, slots of every kind, several chunks, and none.
inline constexpr size_t kCounts[] = {0, 1, 3, 17, 1000, 20001, 70001};

inline float value(int rank, size_t i) { return static_cast<float>(rank + 1) + static_cast<float>(i % 1013) * 0.37f; }

inline std::vector<float> values(int rank, size_t count) {
  std::vector<float> data(count);
  for (size_t i = 0; i < count; ++i) data[i] = value(rank, i);
  return data;
}

// In rank order: these very bits are promised.
inline float sum_of(int ranks, size_t i) {
  float sum = value(0, i);
  for (int rank = 1; rank < ranks; ++rank) sum += value(rank, i);
  return sum;
}

inline void reductions(Rank& self) {
  const auto n = static_cast<size_t>(self.size()), own = static_cast<size_t>(self.rank());
  for (const size_t count : kCounts) {
    auto data = values(self.rank(), count);
    self.communicator.all_reduce(data.data(), count, Type::Float, Reduction::Sum);
    for (size_t i = 0; i < count; ++i) CHECK(data[i] == sum_of(self.size(), i));

    const int root = self.size() - 1;
    data = values(self.rank(), count);
    self.communicator.reduce(data.data(), count, Type::Float, Reduction::Sum, root);
    for (size_t i = 0; self.rank() == root && i < count; ++i) CHECK(data[i] == sum_of(self.size(), i));

    const auto in = values(self.rank(), n * count);
    std::vector<float> out(count);
    self.communicator.reduce_scatter(out.data(), in.data(), count, Type::Float, Reduction::Sum);
    for (size_t i = 0; i < count; ++i) CHECK(out[i] == sum_of(self.size(), own * count + i));
  }
}

inline void movements(Rank& self) {
  const auto n = static_cast<size_t>(self.size()), own = static_cast<size_t>(self.rank());
  for (const size_t count : kCounts) {
    const auto bytes = count * sizeof(float);
    const auto in = values(self.rank(), count);
    std::vector<float> all(n * count), part(count);
    self.communicator.all_gather(all.data(), in.data(), bytes);
    for (size_t r = 0; r < n; ++r) {
      for (size_t i = 0; i < count; ++i) CHECK(all[r * count + i] == value(static_cast<int>(r), i));
    }
    for (const int root : {0, self.size() - 1}) {
      auto everywhere = values(self.rank(), count);
      self.communicator.broadcast(everywhere.data(), bytes, root);
      CHECK(everywhere == values(root, count));

      std::vector<void*> outs;
      for (size_t r = 0; r < n; ++r) outs.push_back(all.data() + r * count);
      std::fill(all.begin(), all.end(), 0.0f);
      self.communicator.gather(outs, in.data(), bytes, root);
      for (size_t i = 0; self.rank() == root && i < n * count; ++i) CHECK(all[i] == value(static_cast<int>(i / count), i % count));

      const auto whole = values(7, n * count);
      std::vector<const void*> ins;
      for (size_t r = 0; r < n; ++r) ins.push_back(whole.data() + r * count);
      self.communicator.scatter(part.data(), ins, bytes, root);
      for (size_t i = 0; i < count; ++i) CHECK(part[i] == value(7, own * count + i));
    }
  }
}

// Rank r sends rank t (r + t) % 3 times `unit` elements.
inline void uneven(Rank& self) {
  const auto n = static_cast<size_t>(self.size()), own = static_cast<size_t>(self.rank());
  for (const size_t unit : kCounts) {
    std::vector<size_t> bytes(n);
    std::vector<float> in, expected;
    for (size_t other = 0; other < n; ++other) {
      const auto count = (own + other) % 3 * unit;
      bytes[other] = count * sizeof(float);
      const auto sent = values(static_cast<int>(10 * own + other), count), received = values(static_cast<int>(10 * other + own), count);
      in.insert(in.end(), sent.begin(), sent.end());
      expected.insert(expected.end(), received.begin(), received.end());
    }
    std::vector<float> out(expected.size());
    self.communicator.all_to_all(out.data(), in.data(), bytes, bytes);
    CHECK(out == expected);
  }
}

// Everybody sends to everybody, large and small, before anybody receives; tags in another order.
inline void messages(Rank& self) {
  for (const size_t count : {size_t{0}, size_t{5}, size_t{200001}}) {
    std::vector<Mailbox::Pointer> requests;
    std::vector<std::vector<float>> sent, received;
    for (int peer = 0; peer < self.size(); ++peer) {
      for (int tag = 0; tag < 2; ++tag) sent.push_back(values(self.rank() * 100 + peer * 10 + tag, count));
    }
    received.assign(sent.size(), std::vector<float>(count));
    for (int peer = 0; peer < self.size(); ++peer) {
      if (peer == self.rank()) continue;
      for (int tag = 0; tag < 2; ++tag) requests.push_back(self.mailbox.send(sent[2 * peer + tag].data(), count * sizeof(float), peer, tag));
    }
    self.mailbox.move_on_alone();
    for (int tag = 1; tag >= 0; --tag) {
      for (int peer = 0; peer < self.size(); ++peer) {
        if (peer != self.rank()) requests.push_back(self.mailbox.receive(received[2 * peer + tag].data(), count * sizeof(float), peer, tag));
      }
    }
    for (const auto& request : requests) self.mailbox.wait(request);
    for (int peer = 0; peer < self.size(); ++peer) {
      for (int tag = 0; tag < 2 && peer != self.rank(); ++tag) CHECK(received[2 * peer + tag] == values(peer * 100 + self.rank() * 10 + tag, count));
    }
    self.communicator.barrier();
  }
}

inline void everything(Rank& self) {
  reductions(self);
  movements(self);
  uneven(self);
  messages(self);
}

}  // namespace tessera::comm::shm
