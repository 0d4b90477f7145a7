#include "tessera/comm/meeting/endpoint.h"

#include <array>
#include <chrono>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/comm/listeners.h"
#include "tests/comm/meeting/silent_host.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing_support::SilentHost;

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

TEST(Endpoint, SilentOnesAreTriedAtOnce) {
  std::array<SilentHost, 10> silent;
  const auto listener = try_listen({"127.0.0.1", 0});
  std::vector<Endpoint> places;
  for (const SilentHost& host : silent) places.push_back({"127.0.0.1", host.port()});
  places.push_back({"127.0.0.1", listener->port()});
  places.push_back({"127.0.0.1", try_listen({"127.0.0.1", 0})->port()});  // let go of
  const auto begin = std::chrono::steady_clock::now();
  const auto probes = probe_all(places, 200ms);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 1s);
  ASSERT_EQ(probes.size(), places.size());
  for (size_t i = 0; i < silent.size(); ++i) {
    EXPECT_EQ(probes[i].problem, "Connection timed out");
    EXPECT_FALSE(probes[i].refused);
  }
  EXPECT_EQ(probes[silent.size()].problem, "");
  EXPECT_TRUE(probes.back().refused);
}

TEST(Endpoint, IsListenedAtAlone) {
  const auto listening_at = [](const std::string& host) {
    const auto listener = try_listen({host, 0});
    return listener ? listening_addresses(listener->port()) : std::set<std::string>{"nowhere"};
  };
  EXPECT_EQ(listening_at("127.0.0.1"), std::set{kLoopback4});
  EXPECT_EQ(listening_at("localhost"), std::set{kLoopback4});
  EXPECT_EQ(listening_at("127.0.0.2"), std::set<std::string>{"0200007F"});
  EXPECT_EQ(listening_at("::1"), std::set{kLoopback6});
  // A name may be another address to others, and what this host does not have may be an address of what stands before it.
  const auto everywhere = listening_at("0.0.0.0");
  EXPECT_EQ(listening_at("192.0.2.1"), everywhere);
  EXPECT_EQ(listening_at("this-host.invalid"), everywhere);
  EXPECT_FALSE(everywhere.contains(kLoopback4));
}

TEST(Endpoint, KnowsThisHost) {
  EXPECT_TRUE(is_local("localhost"));
  EXPECT_TRUE(is_local("::1"));
  EXPECT_FALSE(is_local("192.0.2.1"));  // reserved for documentation
  EXPECT_FALSE(is_local("no-such-host.invalid"));
}

}  // namespace
}  // namespace tessera::comm
