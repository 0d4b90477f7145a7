#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <net/if.h>

#include "tessera/comm/backends/factory.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/meeting/network.h"
#include "tessera/comm/meeting/rendezvous.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Exception>
std::string message(const std::function<void()>& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  return "no exception";
}

TEST(Gloo, BindsToNamesInterfacesAndAddresses) {
  std::vector<std::string> interfaces{"127.0.0.1", "localhost", "lo"};
  try {
    check_interface("::1");
    interfaces.push_back("::1");
  } catch (const ConfigError&) {  // a host without IPv6
  }
  for (const auto& interface : interfaces) {
    run_ranks(2,
              [](World& world) {
                auto sum = at::ones({3});
                all_reduce(world.group(), sum);
                EXPECT_EQ(sum[2].item<float>(), 2);
              },
              {.interface = interface, .backend = "gloo"});
  }
}

TEST(Gloo, AnInterfaceThatThisHostLacksIsRefusedByNameBeforeAnybodyMeets) {
  for (const std::string interface : {"eth77", "192.0.2.1", "no-such-host.invalid"}) {
    const Environment environment{.rank = 1, .size = 2, .local_rank = 1, .local_size = 2, .master_addr = "127.0.0.1", .master_port = 1, .launched = true};
    EXPECT_THAT(message<ConfigError>([&] { World::join(environment, {.interface = interface, .timeout = 200ms}); }),
                AllOf(HasSubstr("comm.interface = " + interface + ": this host has no such interface, name or address; it has "), HasSubstr("lo")));
  }
  EXPECT_NO_THROW(check_interface("lo"));
  EXPECT_NO_THROW(check_interface("127.0.0.1"));
}

TEST(Gloo, TimeoutsOfOneCallAreHonored) {
  run_ranks(2,
            [](World& world) {
              if (world.rank() == 1) return;  // and leaves, so that rank 0's wait is ended by time alone
              const auto tensor = at::ones({4});
              const Call call{.op = Operation::AllReduce, .inputs = {tensor}, .outputs = {tensor}, .reduction = Op::Sum, .timeout = 300ms};
              const auto start = std::chrono::steady_clock::now();
              EXPECT_ANY_THROW(world.group().engine()->start(call)->wait());
              const auto waited = std::chrono::steady_clock::now() - start;
              EXPECT_GE(waited, 250ms);
              EXPECT_LT(waited, 5s);
            },
            {.backend = "gloo"});
}

TEST(Engines, ThatAreMissingAreRefusedWithTheWayOut) {
#ifndef TESSERA_CUDA
  EXPECT_THAT(message<ConfigError>([] { check_engine_name("nccl"); }),
              AllOf(HasSubstr("comm.backend = nccl: this build has no CUDA; build the preset cuda"), HasSubstr("or set comm.backend = auto")));
  EXPECT_FALSE(has_engine("nccl"));
#endif
  EXPECT_TRUE(has_engine("shm"));
  EXPECT_EQ(engine_names().front(), "auto");
  if (has_engine("mpi") && !std::getenv("OMPI_COMM_WORLD_SIZE")) {
    EXPECT_THAT(message<ConfigError>([] { check_engine_name("mpi", {.size = 2}); }),
                AllOf(HasSubstr("comm.backend = mpi: these 2 processes were not started by MPI"), HasSubstr("mpirun -n 2")));
  }
}

TEST(Engines, SayWhatTheyAllocateForADryRun) {
  const auto half = at::empty({6}, at::kHalf), whole = at::empty({6});
  EXPECT_EQ(scratch_bytes("auto", {.op = Operation::AllGather, .inputs = {whole}, .outputs = {whole}}), 0);
  EXPECT_EQ(scratch_bytes("gloo", {.op = Operation::AllGather, .inputs = {whole}, .outputs = {whole}}), 24);
  EXPECT_EQ(scratch_bytes("mpi", {.op = Operation::AllReduce, .inputs = {half}, .outputs = {half}}), 24);
  EXPECT_EQ(scratch_bytes("mpi", {.op = Operation::AllReduce, .inputs = {whole}, .outputs = {whole}}), 0);
  const auto part = at::empty({3}, at::kHalf);
  const Call largest{.op = Operation::ReduceScatter, .inputs = {half}, .outputs = {part}, .reduction = Op::Max};
  EXPECT_EQ(scratch_bytes("gloo", largest), 24 + 24 + 12) << "in order, Gloo's copy of it, the part";
  EXPECT_EQ(scratch_bytes("mpi", largest), 24 + 12);
  EXPECT_EQ(scratch_bytes("nccl", largest), 24 + 12);
  EXPECT_EQ(scratch_bytes("nccl", {.op = Operation::AllReduce, .inputs = {whole}, .outputs = {whole}}), 0);  // also where this machine lacks it
  EXPECT_THROW(scratch_bytes("carrier pigeon", {.op = Operation::Barrier}), ConfigError);
}

TEST(Rendezvous, FormatsRanks) {
  EXPECT_EQ(format_ranks({}), "");
  EXPECT_EQ(format_ranks({3}), "3");
  EXPECT_EQ(format_ranks({1, 2}), "1, 2");
  EXPECT_EQ(format_ranks({0, 2, 3, 4, 7, 8, 12}), "0, 2-4, 7, 8, 12");
}

}  // namespace
}  // namespace tessera::comm
