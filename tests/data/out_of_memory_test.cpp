#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/data/tokenizer.h"
#include "tessera/memory/history.h"
#include "tessera/memory/memory.h"
#include "tests/data/files.h"

namespace tessera::data {
namespace {

// libsentencepiece, which this room brings into the process, has a variable of the name of one of libc10's (sentencepiece_flag.cpp).
TEST(OutOfMemory, IsAnExceptionBesideSentencePiece) {
  constexpr int64_t more_than_there_is = int64_t{1} << 46;
  const auto allocate = [&] { return at::empty({more_than_there_is}); };
  EXPECT_THROW(allocate(), c10::Error);
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  EXPECT_THROW(allocate(), c10::OutOfMemoryError);
  ASSERT_TRUE(tracker.refusal().has_value());
  EXPECT_EQ(tracker.refusal()->requested, 4 * more_than_there_is);
  EXPECT_EQ(tracker.current(), 0);
}

}  // namespace
}  // namespace tessera::data
