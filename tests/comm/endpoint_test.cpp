#include "tessera/comm/endpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

TEST(Endpoint, IsReadInAllItsSpellings) {
  EXPECT_EQ(parse_endpoint("host:5", "k", 9), (Endpoint{"host", 5}));
  EXPECT_EQ(parse_endpoint("host", "k", 9), (Endpoint{"host", 9}));
  EXPECT_EQ(parse_endpoint("10.0.0.1:0", "k", 9), (Endpoint{"10.0.0.1", 0}));
  EXPECT_EQ(parse_endpoint("[::1]:5", "k", 9), (Endpoint{"::1", 5}));
  EXPECT_EQ(parse_endpoint("[fe80::2]", "k", 9), (Endpoint{"fe80::2", 9}));
  EXPECT_EQ(parse_endpoint("fe80::2", "k", 9), (Endpoint{"fe80::2", 9}));
  for (const char* text : {"", ":5", "host:", "host:x", "host:-1", "host:65536", "[::1", "[::1]5", "[::1]:", "[]:5"}) {
    EXPECT_THROW(parse_endpoint(text, "knob", 9), ConfigError) << text;
  }
}

TEST(Endpoint, TellsWhoListens) {
  for (const char* host : {"127.0.0.1", "::1", "localhost", "0.0.0.0"}) {
    auto listener = try_listen({host, 0});
    ASSERT_TRUE(listener) << host;
    const Endpoint place{listener->address(), listener->port()};
    EXPECT_EQ(probe(place, 1s).problem, "");
    EXPECT_EQ(probe(place, 1s).local_address, listener->address());
    EXPECT_FALSE(try_listen({host, place.port})) << host;
    listener.reset();
    const Probe nobody = probe(place, 1s);
    EXPECT_TRUE(nobody.refused);
    EXPECT_EQ(nobody.problem, "Connection refused");
  }
  const Probe unknown = probe({"no-such-host.invalid", 5}, 1s);
  EXPECT_THAT(unknown.problem, ::testing::StartsWith("the name does not resolve"));
  EXPECT_FALSE(unknown.refused);
}

TEST(Endpoint, KnowsThisHost) {
  EXPECT_TRUE(is_local("localhost"));
  EXPECT_TRUE(is_local("::1"));
  EXPECT_FALSE(is_local("192.0.2.1"));  // reserved for documentation
  EXPECT_FALSE(is_local("no-such-host.invalid"));
}

}  // namespace
}  // namespace tessera::comm
