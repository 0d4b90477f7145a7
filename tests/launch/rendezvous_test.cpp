#include "tessera/launch/rendezvous.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/comm/meeting/stores.h"
#include "tessera/core/error.h"

namespace tessera::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* host = "127.0.0.1";

/// What an agent of that job, which does not serve, is told at that port.
std::string told(const std::string& run_id, int port) {
  try {
    Rendezvous({.endpoint = comm::Endpoint{host, port}, .run_id = run_id, .serves = false}).connect();
  } catch (const CommError& error) {
    return error.what();
  }
  return "met";
}

TEST(Rendezvous, AnAgentOfAnotherJobIsToldWhosePlaceItIs) {
  const int port = comm::try_listen({host, 0})->port();
  Rendezvous serves({.endpoint = comm::Endpoint{host, port}, .run_id = "j", .serves = true});
  const auto board = serves.connect();
  EXPECT_EQ(told("j", port), "met");
  EXPECT_EQ(told("k", port), "the job there has --rdzv-id j, this agent k; give all agents of a job the same");
}

TEST(Rendezvous, AStoreThatNoAgentServesIsNamed) {
  const auto store = comm::serve_store({host, 0});
  EXPECT_THAT(told("j", store->getPort()), AllOf(HasSubstr("the store there is not served by an agent"), HasSubstr("another --rdzv-endpoint")));
}

}  // namespace
}  // namespace tessera::launch
