#include "tessera/core/events.h"

#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/core/host_read.h"

namespace tessera {
namespace {

Event event(std::vector<int64_t> reads, std::vector<int64_t> writes) {
  return {.what = OperatorEvent{}, .reads = std::move(reads), .writes = std::move(writes)};
}

using After = std::vector<std::vector<int64_t>>;

TEST(Events, WaitForWhoWroteWhatTheyReadAndForWhoReadWhatTheyWrite) {
  EXPECT_EQ(dependencies({event({}, {1}), event({1}, {2}), event({1, 2}, {3})}), (After{{}, {0}, {0, 1}}));
  EXPECT_EQ(dependencies({event({}, {1}), event({1}, {2}), event({1}, {3}), event({}, {1}), event({1}, {})}), (After{{}, {0}, {0}, {0, 1, 2}, {3}}));
  EXPECT_EQ(dependencies({event({7}, {7}), event({7}, {7})}), (After{{}, {0}})) << "in place, and what was there before all events";
  EXPECT_EQ(dependencies({event({1, 1}, {2}), event({2, 2}, {2})}), (After{{}, {0}})) << "each once";
}

TEST(Events, OfAThreadGoWhereItListens) {
  EXPECT_EQ(EventStream::current(), nullptr);
  EventStream outer, inner;
  {
    const ListenToEvents listening(outer);
    host_read(at::empty({1}, at::device(at::kMeta)), 1);
    {
      const ListenToEvents closer(inner);
      host_read_all(at::empty({3}, at::device(at::kMeta)), 1);
    }
    EXPECT_EQ(EventStream::current(), &outer);
    std::thread([] { EXPECT_EQ(EventStream::current(), nullptr); }).join();
  }
  EXPECT_EQ(EventStream::current(), nullptr);
  host_read(at::empty({1}, at::device(at::kMeta)), 1);
  EXPECT_EQ(only<HostReadEvent>(outer.take()), (std::vector<HostReadEvent>{{.bytes = 4}}));
  EXPECT_EQ(only<HostReadEvent>(inner.take()), (std::vector<HostReadEvent>{{.bytes = 12}}));
  EXPECT_EQ(outer.count(), 1);
  EXPECT_TRUE(outer.take().empty());
}

}  // namespace
}  // namespace tessera
