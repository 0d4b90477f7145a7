#include "tessera/comm/world.h"

#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/meeting/rendezvous.h"
#include "tessera/comm/testing.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tests/comm/listeners.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

Environment read_environment_of(const std::map<std::string, std::string>& variables) {
  return read_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

template <class Exception>
std::string message_of_world(const std::function<void()>& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  return "no exception";
}

c10::intrusive_ptr<c10d::TCPStore> serve_anywhere() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

// One that was free a moment ago.
int free_port() { return serve_anywhere()->getPort(); }

bool has_ipv6() {
  const int descriptor = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 loopback{};
  loopback.sin6_family = AF_INET6;
  loopback.sin6_addr = in6addr_loopback;
  const bool bound = descriptor >= 0 && ::bind(descriptor, reinterpret_cast<sockaddr*>(&loopback), sizeof(loopback)) == 0;
  if (descriptor >= 0) ::close(descriptor);
  return bound;
}

const std::map<std::string, std::string> kTorchrunVariables{
    {"RANK", "5"}, {"LOCAL_RANK", "1"}, {"WORLD_SIZE", "8"}, {"LOCAL_WORLD_SIZE", "4"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29400"}};

std::map<std::string, std::string> torchrun_with(const std::string& name, const std::optional<std::string>& value) {
  auto variables = kTorchrunVariables;
  variables.erase(name);
  if (value) variables[name] = *value;
  return variables;
}

TEST(Environment, AloneWithoutVariables) {
  const auto environment = read_environment_of({{"PATH", "/bin"}, {"MASTER_PORT", "x"}});
  EXPECT_FALSE(environment.launched);
  EXPECT_EQ(environment.size, 1);
}

TEST(Environment, ReadsTorchrun) {
  auto variables = kTorchrunVariables;
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RESTART_COUNT"] = "3";
  const auto environment = read_environment_of(variables);
  EXPECT_EQ(environment.rank, 5);
  EXPECT_EQ(environment.size, 8);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_size, 4);
  EXPECT_EQ(environment.master_addr, "10.0.0.1");
  EXPECT_EQ(environment.master_port, 29400);
  EXPECT_TRUE(environment.agent_store);
  EXPECT_EQ(environment.restart_count, 3);
  EXPECT_TRUE(environment.launched);
  EXPECT_FALSE(read_environment_of(torchrun_with("TORCHELASTIC_USE_AGENT_STORE", "False")).agent_store);
}

TEST(Environment, NamesTheJobAsFarAsItsLauncherDoes) {
  EXPECT_EQ(read_environment_of(kTorchrunVariables).job, "");
  EXPECT_EQ(read_environment_of(torchrun_with("TORCHELASTIC_RUN_ID", "none")).job, "") << "what torchrun calls any job";
  EXPECT_EQ(read_environment_of(torchrun_with("TORCHELASTIC_RUN_ID", "100")).job, "100");
  auto variables = torchrun_with("TORCHELASTIC_RUN_ID", "100");
  variables["TESSERA_JOB"] = "9f86d081884c7d65";
  EXPECT_EQ(read_environment_of(variables).job, "9f86d081884c7d65");
}

TEST(Environment, OneHostWhereNothingElseIsSaid) {
  const auto environment = read_environment_of({{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(environment.local_rank, 2);
  EXPECT_EQ(environment.local_size, 3);
}

TEST(Environment, OneRankNeedsNoMaster) { EXPECT_EQ(read_environment_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).size, 1); }

TEST(Environment, RefusesByNameAndValue) {
  const auto refusal = [](const std::string& name, const std::optional<std::string>& value) {
    return message_of_world<ConfigError>([&] { read_environment_of(torchrun_with(name, value)); });
  };
  EXPECT_EQ(refusal("RANK", "8"), "RANK = 8 must be between 0 and WORLD_SIZE - 1 = 7");
  EXPECT_EQ(refusal("RANK", "-1"), "RANK = -1 must be between 0 and WORLD_SIZE - 1 = 7");
  EXPECT_EQ(refusal("RANK", "two"), "RANK = \"two\" is not a whole number; it must be between 0 and WORLD_SIZE - 1 = 7");
  EXPECT_EQ(refusal("RANK", "1 "), "RANK = \"1 \" is not a whole number; it must be between 0 and WORLD_SIZE - 1 = 7");
  EXPECT_EQ(refusal("WORLD_SIZE", "0"), "WORLD_SIZE = 0 must be between 1 and 16777216");
  EXPECT_EQ(refusal("LOCAL_RANK", "4"), "LOCAL_RANK = 4 must be between 0 and LOCAL_WORLD_SIZE - 1 = 3");
  EXPECT_EQ(refusal("LOCAL_WORLD_SIZE", "9"), "LOCAL_WORLD_SIZE = 9 must be between 1 and WORLD_SIZE = 8");
  EXPECT_EQ(refusal("TORCHELASTIC_RESTART_COUNT", "x"), "TORCHELASTIC_RESTART_COUNT = \"x\" is not a whole number; it must be 0 or more");
  EXPECT_EQ(refusal("TORCHELASTIC_RESTART_COUNT", "-1"), "TORCHELASTIC_RESTART_COUNT = -1 must be 0 or more");
  EXPECT_EQ(refusal("MASTER_PORT", "70000"), "MASTER_PORT = 70000 must be a port, 1 to 65535");
  EXPECT_EQ(refusal("MASTER_PORT", "http"), "MASTER_PORT = \"http\" is not a whole number; it must be a port, 1 to 65535");
  EXPECT_EQ(refusal("MASTER_PORT", std::nullopt),
            "MASTER_PORT is not set while WORLD_SIZE = 8; set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them to run alone");
  EXPECT_THAT(refusal("MASTER_ADDR", ""), HasSubstr("MASTER_ADDR is not set"));
  EXPECT_THAT(refusal("RANK", std::nullopt), HasSubstr("RANK is not set while other variables of a launcher are"));
  EXPECT_THAT(refusal("WORLD_SIZE", std::nullopt), HasSubstr("WORLD_SIZE is not set"));
}

TEST(World, AloneIsTheIdentity) {
  const auto world = World::alone();
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.group().engine(), nullptr);
  EXPECT_EQ(world.subgroup({0}, "tp").name(), "tp");
  EXPECT_FALSE(world.is_dry());
}

TEST(World, RefusesABackendThatThisBuildLacks) {
  EXPECT_THAT(message_of_world<ConfigError>([] { World::alone({.backend = "carrier pigeon"}); }),
              HasSubstr("comm.backend = carrier pigeon: there is no such backend; this build has auto, gloo, shm"));
}

TEST(World, NamesAddressPortAndSecondsWhenNobodyServes) {
  const int port = free_port();
  const Environment environment{.rank = 1, .size = 2, .local_rank = 1, .local_size = 2, .master_addr = "127.0.0.1", .master_port = port, .launched = true};
  EXPECT_THAT(message_of_world<CommError>([&] { World::join(environment, {.timeout = 300ms}); }),
              AllOf(HasSubstr("rank 1 of 2: no rendezvous at address 127.0.0.1, port " + std::to_string(port)),
                    HasSubstr(" (served by rank 0): Connection refused; waited ")));
}

TEST(World, NamesAnAddressThatDoesNotResolve) {
  const Environment environment{
      .rank = 1, .size = 2, .local_rank = 1, .local_size = 2, .master_addr = "no-such-host.invalid", .master_port = 29400, .launched = true};
  EXPECT_THAT(message_of_world<CommError>([&] { World::join(environment, {.timeout = 100ms}); }),
              HasSubstr("no rendezvous at address no-such-host.invalid, port 29400 (served by rank 0): the name does not resolve: "));
}

/// What a batch script leaves in the environment of a program that it starts without srun.
TEST(World, SaysByWhichVariablesItWaitsForOthers) {
  const std::map<std::string, std::string> script{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"}};
  const auto read = [](const std::map<std::string, std::string>& variables) {
    return read_environment([&](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
  };
  auto environment = read(script);
  environment.master_port = free_port();
  testing::internal::CaptureStderr();
  message_of_world<CommError>([&] { World::join(environment, {.timeout = 300ms}); });
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("It is one of 4 by SLURM_PROCID = 0 and SLURM_NTASKS = 4, which look like those of a batch script without srun"),
                    HasSubstr("start it by srun, or unset SLURM_PROCID")));
  auto step = script;
  step["SLURM_STEP_ID"] = "0";
  EXPECT_EQ(read(step).told_by, "SLURM_PROCID = 0 and SLURM_NTASKS = 4");
  EXPECT_EQ(read({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).told_by, "RANK = 0 and WORLD_SIZE = 1");
  EXPECT_EQ(read({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}}).told_by, "OMPI_COMM_WORLD_RANK = 1 and OMPI_COMM_WORLD_SIZE = 2");
}

TEST(World, SaysWhichRanksDidNotCome) {
  const Environment environment{.rank = 0, .size = 3, .local_size = 3, .master_addr = "127.0.0.1", .master_port = free_port(), .launched = true};
  testing::internal::CaptureStderr();  // long before the end it says for whom it waits, once
  const std::string refused = message_of_world<CommError>([&] { World::join(environment, {.timeout = 300ms}); });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(refused, AllOf(HasSubstr("no rendezvous at address 127.0.0.1, port "), HasSubstr("1 of 3 ranks have come; missing: 1, 2; waited ")));
  EXPECT_THAT(said, HasSubstr("rank 0 of 3 has waited "));
  EXPECT_THAT(said, HasSubstr(" for ranks 1, 2; it goes on until comm.timeout_s"));
  EXPECT_EQ(said.find("has waited"), said.rfind("has waited"));
}

TEST(World, RankZeroServesOnTheNamedAddressAloneAndLeavesLast) {
  for (const std::string host : {"127.0.0.1", "::1"}) {
    if (host == "::1" && !has_ipv6()) continue;
    const int port = free_port();
    std::vector<std::thread> ranks;
    std::atomic<int> left = 0;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        auto world = World::join({.rank = rank, .size = 3, .local_rank = rank, .local_size = 3, .master_addr = host, .master_port = port, .launched = true},
                                 {.timeout = 20s});
        auto sum = at::ones({2});
        all_reduce(world.group(), sum);
        EXPECT_EQ(sum[0].item<float>(), 3);
        if (rank == 0) EXPECT_EQ(listening_addresses(port), std::set{host == "::1" ? kLoopback6 : kLoopback4}) << "who reaches the store may write into it";
        if (rank == 2) std::this_thread::sleep_for(50ms);
        EXPECT_TRUE(world.leave());
        EXPECT_TRUE(world.leave());
        ++left;
      });
    }
    for (auto& rank : ranks) rank.join();
    EXPECT_EQ(left, 3);
  }
}

/// As a program whose functions each join for themselves: the launcher's store still has the keys of the world before.
TEST(World, SeveralInOneProcessUnderALaunchersStore) {
  const auto store = serve_anywhere();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto join = [&] {
        return World::join({.rank = rank,
                            .size = 3,
                            .local_rank = rank,
                            .local_size = 3,
                            .master_addr = "127.0.0.1",
                            .master_port = store->getPort(),
                            .agent_store = true,
                            .launched = true},
                           {.timeout = 20s});
      };
      const auto sum = [](const World& world, float mine) {
        auto all = at::full({2}, mine);
        all_reduce(world.group(), all);
        return all[0].item<float>();
      };
      for (int again = 0; again < 2; ++again) {
        auto world = join();
        EXPECT_EQ(sum(world, static_cast<float>(again)), 3 * again);
        EXPECT_TRUE(world.leave());
      }
      const auto first = join(), second = join();
      EXPECT_EQ(sum(second, 2), 6);
      EXPECT_EQ(sum(first, 1), 3);
    });
  }
  for (auto& rank : ranks) rank.join();
}

/// In the keys of an earlier world all have left already, so that nobody waits for a rank that has not.
void expect_keys_of_its_own(World& world) {
  auto until = at::full({1}, (std::chrono::steady_clock::now() + 200ms).time_since_epoch().count(), at::kLong);
  broadcast(world.group(), until, 0);
  const std::chrono::steady_clock::time_point when(std::chrono::steady_clock::duration(until.item<int64_t>()));
  if (world.rank() == 0) std::this_thread::sleep_until(when);
  EXPECT_TRUE(world.leave());
  EXPECT_GE(std::chrono::steady_clock::now(), when);
}

/// `tessera run bash -c "tessera train ... && tessera eval ..."`: other processes, in whose launcher's store are the keys of the first ones.
TEST(World, TwoProgramsUnderALaunchersStore) { run_rank_processes(2, "World.TwoProgramsUnderALaunchersStore", expect_keys_of_its_own, 60, "auto", 2); }

/// As a job of torchrun's that goes on with more nodes, and then with as few as before: that is no attempt of its own.
TEST(World, OfOtherSizesInOneStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const int size : {2, 3, 2, 2}) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        auto world = World::join({.rank = rank, .size = size, .local_rank = rank, .local_size = size, .launched = true}, store, {.timeout = 20s});
        expect_keys_of_its_own(world);
      });
    }
    for (auto& rank : ranks) rank.join();
  }
}

/// One that a program joins in the launcher's store, which gathers nobody, and then the environment's: each has keys of its own, though a rank is late.
TEST(World, OneOfAStoreAndThenTheEnvironmentsUnderALaunchersStore) {
  const auto served = serve_anywhere();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const Environment environment{.rank = rank,
                                    .size = 2,
                                    .local_rank = rank,
                                    .local_size = 2,
                                    .master_addr = "127.0.0.1",
                                    .master_port = served->getPort(),
                                    .agent_store = true,
                                    .launched = true};
      const auto meet = [&](World world) {
        auto all = at::ones({2});
        all_reduce(world.group(), all);
        EXPECT_EQ(all[0].item<float>(), 2) << rank;
        EXPECT_TRUE(world.leave());
      };
      c10d::TCPStoreOptions client;
      client.port = served->getPort();
      client.waitWorkers = false;
      client.timeout = 10s;
      for (int again = 0; again < 2; ++again) {
        meet(World::join(environment, c10::make_intrusive<c10d::TCPStore>("127.0.0.1", client), {.timeout = 5s}));
        if (rank == 1) std::this_thread::sleep_for(200ms);
        meet(World::join(environment, {.timeout = 5s}));
      }
    });
  }
  for (auto& rank : ranks) rank.join();
}

/// As by srun, or in pods that are started again one by one: the first process of rank 1 came, and ended.
TEST(World, ARankThatIsStartedAgainMeetsThoseWhoStillGather) {
  const int port = free_port();
  const auto environment = [port](int rank) {
    return Environment{.rank = rank, .size = 3, .local_rank = rank, .local_size = 3, .master_addr = "127.0.0.1", .master_port = port, .launched = true};
  };
  std::vector<std::thread> ranks;
  const auto start = [&](int rank) {
    ranks.emplace_back([&, rank] {
      auto world = World::join(environment(rank), {.timeout = 20s});
      auto all = at::ones({2});
      all_reduce(world.group(), all);
      EXPECT_EQ(all[0].item<float>(), 3) << rank;
    });
  };
  start(0);
  {
    c10d::TCPStoreOptions client;
    client.port = static_cast<uint16_t>(port);
    client.waitWorkers = false;
    client.timeout = 10s;
    const auto world = next_world(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", client), environment(1), Arrival::Announced);
    EXPECT_EQ(world.number, 0);
    world.store->add("rendezvous/count", 1);
    world.store->set("rendezvous/1", "here");
  }
  start(1);
  start(2);
  for (auto& rank : ranks) rank.join();
}

/// Rank 0 leaves last, so the others may come to their next world while it still serves the one before.
TEST(World, ARankThatIsEarlyForTheNextOneWaitsUntilRankZeroServesIt) {
  const int port = free_port();
  const auto join = [port](int rank) {
    return World::join({.rank = rank, .size = 2, .local_rank = rank, .local_size = 2, .master_addr = "127.0.0.1", .master_port = port, .launched = true},
                       {.timeout = 20s});
  };
  const auto sum = [](const World& world) {
    auto all = at::ones({2});
    all_reduce(world.group(), all);
    EXPECT_TRUE(world.reported_failure().empty());
    return all[0].item<float>();
  };
  std::thread late([&] {
    {
      auto world = join(0);
      EXPECT_EQ(sum(world), 2);
      EXPECT_TRUE(world.leave());
      std::this_thread::sleep_for(300ms);  // as a program does that has something left to write
    }
    EXPECT_EQ(sum(join(0)), 2);
  });
  std::thread early([&] {
    {
      auto world = join(1);
      EXPECT_EQ(sum(world), 2);
    }
    EXPECT_EQ(sum(join(1)), 2);
  });
  late.join();
  early.join();
}

TEST(World, NamesThePortInUse) {
  const auto other = serve_anywhere();
  const Environment environment{.rank = 0, .size = 2, .local_size = 2, .master_addr = "127.0.0.1", .master_port = other->getPort(), .launched = true};
  EXPECT_THAT(message_of_world<CommError>([&] { World::join(environment, {.timeout = 2s}); }),
              AllOf(HasSubstr("port " + std::to_string(other->getPort())), HasSubstr("in use")));
}

TEST(World, NamesAnInterfaceThatCannotBeBound) {
  EXPECT_THAT(message_of_world<CommError>([] { run_ranks(2, [](World&) {}, {.interface = "no-such-host.invalid", .backend = "gloo"}); }),
              HasSubstr("comm.interface = no-such-host.invalid: Gloo cannot bind to it"));
}

TEST(World, RanksThatWereToldDifferentlyHowToMeetAllRefuse) {
  const auto refusals = [](const std::vector<WorldOptions>& of_ranks) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const int size = static_cast<int>(of_ranks.size());
    std::vector<std::string> said(of_ranks.size());
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        said[static_cast<size_t>(rank)] = message_of_world<ConfigError>([&] {
          World::join({.rank = rank, .size = size, .local_rank = rank, .local_size = size, .launched = true}, store, of_ranks[static_cast<size_t>(rank)]);
        });
      });
    }
    for (auto& rank : ranks) rank.join();
    return said;
  };
  const WorldOptions usual{.timeout = 20s};
  WorldOptions checked = usual, over_gloo = usual, by_ring = usual, by_table = usual;
  by_table.rows = {{.op = "all_gather", .backend = "gloo", .algorithm = "ring", .bytes = 8, .ranks = 2, .time_us = 1}};
  checked.check = true, over_gloo.backend = "gloo", by_ring.algorithm = "ring";
  EXPECT_THAT(refusals({usual, checked}), testing::Each(HasSubstr("comm.check = false on rank 0, true on rank 1: all ranks of a run need the same")));
  EXPECT_THAT(refusals({usual, over_gloo, usual}), testing::Each(HasSubstr("comm.backend = auto on ranks 0, 2, gloo on rank 1")));
  EXPECT_THAT(refusals({by_ring, usual}), testing::Each(HasSubstr("comm.algorithm = ring on rank 0, auto on rank 1")));
  EXPECT_THAT(refusals({by_table, usual}), testing::Each(AllOf(HasSubstr("comm.table = content "), HasSubstr(" on rank 0, no rows on rank 1"))));
  EXPECT_THAT(refusals({usual, usual, by_table}), testing::Each(HasSubstr("comm.table = no rows on ranks 0, 1, content ")));
  auto other_table = by_table;
  other_table.rows[0].algorithm = "bruck";
  EXPECT_THAT(refusals({by_table, other_table}), testing::Each(HasSubstr("comm.table = content ")));
  EXPECT_THAT(refusals({by_table, by_table}), testing::Each("no exception"));
  EXPECT_THAT(refusals({checked, checked}), testing::Each("no exception"));
}

TEST(World, SubgroupsOfAnyMembersInAnyOrder) {
  run_ranks(5, [](World& world) {
    const bool odd = world.rank() % 2 == 1;
    const auto mine = odd ? world.subgroup({3, 1}, "parity") : world.subgroup({0, 2, 4}, "parity");
    EXPECT_EQ(mine.size(), odd ? 2 : 3);
    EXPECT_EQ(mine.world_rank(mine.rank()), world.rank());
    auto sum = at::full({3}, float(world.rank()));
    all_reduce(mine, sum);
    EXPECT_EQ(sum[0].item<float>(), odd ? 4 : 6);
    auto first = at::full({1}, float(world.rank()));
    broadcast(mine, first, 0);
    EXPECT_EQ(first.item<float>(), odd ? 3 : 0);
    // The same members and name once more: another group.
    const auto again = odd ? world.subgroup({3, 1}, "parity") : world.subgroup({0, 2, 4}, "parity");
    all_reduce(again, sum);
    EXPECT_EQ(sum[0].item<float>(), odd ? 8 : 18);
    if (world.rank() == 2) {
      EXPECT_EQ(world.subgroup({2}, "one").size(), 1);
      EXPECT_THROW(world.subgroup({0, 1}, "others"), InternalError);
      EXPECT_THROW(world.subgroup({2, 5}, "outside"), InternalError);
      EXPECT_THROW(world.subgroup({2, 1, 1}, "twice"), InternalError);
    }
  });
}

TEST(World, TakesItsOptionsFromTheConfiguration) {
  CommConfig config;
  config.timeout_s = 1.5;
  config.interface = "eth7";
  const auto options = world_options(config);
  EXPECT_EQ(options.timeout, 1500ms);
  EXPECT_EQ(options.interface, "eth7");
  EXPECT_EQ(options.backend, "auto");
}

TEST(World, GroupsOutliveIt) {
  run_ranks(2, [](World& world) {
    const auto group = World(std::move(world)).group();
    EXPECT_EQ(group.size(), 2);
  });
}

TEST(World, DecoratorsSeeEveryGroupOfSeveral) {
  std::mutex mutex;
  std::multiset<std::string> seen;
  const Decorator watch = [&](std::shared_ptr<Engine> inner, const GroupInfo& group) {
    const std::lock_guard lock(mutex);
    seen.insert(group.name);
    return inner;
  };
  run_ranks(2, [](World& world) { world.subgroup({0, 1}, "tp"), world.subgroup({world.rank()}, "cp"); }, {.decorators = {watch}});
  EXPECT_EQ(seen, (std::multiset<std::string>{"tp", "tp", "world", "world"}));
}

TEST(World, FromLauncherVariablesAcrossProcesses) {
  run_rank_processes(3, "World.FromLauncherVariablesAcrossProcesses", [](World& world) {
    ASSERT_EQ(world.size(), 3);
    EXPECT_EQ(world.local_rank(), world.rank());
    auto sum = at::full({1000}, float(world.rank() + 1));
    all_reduce(world.group(), sum);
    EXPECT_TRUE(sum.equal(at::full({1000}, 6.0f)));
    auto all = at::empty({3}, at::kLong);
    all_gather(world.group(), all, at::full({1}, world.rank(), at::kLong));
    EXPECT_TRUE(all.equal(at::arange(3)));
    std::vector<int64_t> from{0, 1, 2};  // rank r gets t rows from rank t
    const std::vector<int64_t> to(3, world.rank());
    auto rows = at::empty({3});
    all_to_all(world.group(), rows, at::full({3 * world.rank()}, float(world.rank())), from, to);
    EXPECT_TRUE(rows.equal(at::tensor({1.0f, 2.0f, 2.0f})));
  });
}

TEST(Failure, IsThatOfTheRankThatFailedFirst) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(message_of_world<ConfigError>([] {
                run_ranks(3, [](World& world) {
                  auto tensor = at::ones({4});
                  all_reduce(world.group(), tensor);
                  require(world.rank() != 2, "data.files = nothing");
                  all_reduce(world.group(), tensor);
                });
              }),
              "rank 2: data.files = nothing");
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

TEST(Failure, EndsRanksThatWaitInEveryWay) {
  const std::vector<std::function<void(World&)>> ways{
      [](World& world) { barrier(world.group()); },
      [](World& world) {
        auto tensor = at::ones({4});
        recv(world.group(), tensor, 1);
      },
      [](World& world) { world.subgroup({0, 1}, "late"); },
      [](World& world) {
        auto first = at::ones({4}), second = at::ones({4});
        auto pending = all_reduce_async(world.group(), first);
        all_reduce(world.group(), second);
        pending.wait();
      },
  };
  for (const auto& way : ways) {
    const auto start = std::chrono::steady_clock::now();
    std::string seen;
    EXPECT_THROW(run_ranks(2,
                           [&](World& world) {
                             if (world.rank() == 1) throw std::runtime_error("out of paper");
                             try {
                               way(world);
                             } catch (const CommError& error) {
                               seen = error.what();
                               throw;
                             }
                           }),
                 std::runtime_error);
    EXPECT_THAT(seen, AllOf(HasSubstr("group"), HasSubstr("waited"), HasSubstr("rank 1 failed: out of paper")));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  }
}

TEST(Failure, APendingCollectiveOfTheFailingRankDoesNotHoldItsEnd) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(2,
                         [](World& world) {
                           auto tensor = at::ones({4});
                           if (world.rank() == 0) {
                             auto pending = all_reduce_async(world.group(), tensor);
                             throw std::runtime_error("gave up");
                           }
                           recv(world.group(), tensor, 0);
                         }),
               std::runtime_error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

TEST(Failure, AWorldThatDiesByAnExceptionHoldsNobody) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(2,
                         [](World& world) {
                           const World mine(std::move(world));
                           auto tensor = at::ones({4});
                           if (mine.rank() == 0) {
                             auto pending = all_reduce_async(mine.group(), tensor);
                             throw std::logic_error("unforeseen");
                           }
                           recv(mine.group(), tensor, 0);
                         }),
               std::runtime_error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

TEST(Failure, ATimeoutNamesOpGroupRankAndSeconds) {
  EXPECT_THAT(message_of_world<CommError>([] {
                run_ranks(2,
                          [](World& world) {
                            const auto group = world.subgroup({1, 0}, "tp");
                            auto tensor = at::ones({4});
                            if (world.rank() == 0) all_reduce(group, tensor);
                          },
                          {.timeout = 300ms});
              }),
              AllOf(HasSubstr("rank 0: all_reduce of group tp, rank 1 of 2 (rank 0 of the world): "), HasSubstr("; waited 0.")));
}

TEST(Failure, OfAProcessShowsItsOutput) {
  try {
    run_rank_processes(2, "Failure.OfAProcessShowsItsOutput", [](World& world) {
      if (world.rank() == 1) throw std::runtime_error("lost the plot");
      auto tensor = at::ones({4});
      all_reduce(world.group(), tensor);
    });
    if (std::getenv("RANK") == nullptr) FAIL() << "a failing rank went unnoticed";
  } catch (const std::runtime_error& error) {
    if (std::getenv("RANK")) throw;  // this is the copy
    EXPECT_THAT(error.what(), AllOf(HasSubstr("failed:"), HasSubstr("lost the plot")));
  }
}

}  // namespace
}  // namespace tessera::comm
