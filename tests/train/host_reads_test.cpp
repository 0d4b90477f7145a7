// How often a step waits for what a device has computed: once, for what it reports, whatever the layout. Counted are reads through core/host_read.h, and
// operators that would read beside it: on the CPU neither costs anything, so nothing but a count would notice one more. On the simulated accelerator, whatever
// makes the host wait is counted by the device itself.

#include <map>
#include <mutex>
#include <set>
#include <string>

#include "tessera/comm/collectives.h"
#include "tessera/core/events.h"
#include "tessera/nn/operators.h"
#include "tessera/train/batch_feed.h"
#include "tests/train/fixture.h"

#ifdef TESSERA_SIM_DEVICE
#include "tests/support/sim_device/happens_before.h"
#endif

namespace tessera {
namespace {

using testing_support::TrainFixture;

/// Takes down operators that cannot answer before the host has seen data.
class Readers final : public nn::OperatorHooks {
 public:
  void call(nn::OperatorCall& operation) override {
    // Neither item() nor equal(): on a CPU, operators ask them of numbers, and recomputation of states of generators, that are on no device.
    static const std::set<std::string> readers{"aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::bincount", "aten::_unique2"};
    if (readers.contains(operation.name())) ++seen[operation.name()];
    operation.run();
  }
  std::map<std::string, int64_t> seen;
};

/// How often the host waited for a device since it was last asked, of all ranks, by operator; nothing on the CPU.
std::map<std::string, int64_t> take_waits() {
#ifdef TESSERA_SIM_DEVICE
  return sim::HappensBefore::get().take_host_syncs();
#else
  return {};
#endif
}

struct Case {
  std::string family;
  int ranks;
  std::vector<std::string> sets;
};

std::string name_of(const Case& what) {
  std::string name = what.family + " over " + std::to_string(what.ranks);
  for (const auto& set : what.sets) name += " " + set;
  return name;
}

class HostReads : public TrainFixture {
 protected:
  struct Counted {
    int64_t reads = 0;  ///< through host_read
    std::map<std::string, int64_t> operators;
    std::map<std::string, int64_t> waits;  ///< of all ranks together
  };

  /// Of the third step, on the rank with the most: buckets are in their order by then.
  Counted reads_of(const Case& what) const {
    std::vector<std::string> sets{"model.dim=8", "model.heads=2", "model.ffn_dim=12", "data.seq_len=8", "batch.global_size=7", "batch.micro_size=1"};
    sets.insert(sets.end(), what.sets.begin(), what.sets.end());
    const Config config = this->config(what.family, sets);
    const auto text = corpus(config);
    Counted most;
    std::mutex mutex;
    comm::run_ranks(what.ranks, [&](comm::World& ranks) {
      validate(config, ranks.size());
      Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      Stepper stepper(config, mesh, testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(config, mesh));
      BatchFeed feed(std::move(loader), testing_support::test_device());
      for (int step = 1; step <= 2; ++step) stepper.step(feed.next());
      feed.prepare();
      const auto meet = [&] { comm::barrier(ranks.group()); };
      meet();
      if (ranks.rank() == 0) take_waits();
      meet();
      const auto readers = std::make_shared<Readers>();
      EventStream events;
      {
        const nn::OperatorScope watched(readers);
        const ListenToEvents listening(events);
        stepper.step(feed.next(), {.meanwhile = [&] { feed.prepare(); }});
      }
      meet();
      const std::lock_guard lock(mutex);
      if (ranks.rank() == 0) most.waits = take_waits();
      most.reads = std::max(most.reads, static_cast<int64_t>(only<HostReadEvent>(events.take()).size()));
      for (const auto& [name, count] : readers->seen) most.operators[name] = std::max(most.operators[name], count);
    });
    return most;
  }
};

TEST_F(HostReads, AStepHasOneWhateverTheLayout) {
  std::vector<Case> cases;
  for (const char* stage : {"0", "1", "2", "3"}) {
    for (const int ranks : {1, 2, 3}) cases.push_back({"llama", ranks, {std::string("zero.stage=") + stage}});
  }
  cases.push_back({"gpt2", 2, {"model.dropout=0.1"}});
  cases.push_back({"llama", 2, {"mesh.tp=2"}});
  cases.push_back({"llama", 2, {"mesh.tp=2", "tensor.sequence_parallel=true"}});
  cases.push_back({"llama", 2, {"mesh.pp=2"}});
  cases.push_back({"llama", 2, {"mesh.pp=2", "model.tie_embeddings=true", "pipeline.schedule=zb_h1"}});
  cases.push_back({"llama", 3, {"run.deterministic=true"}});
  cases.push_back({"llama", 2, {"recompute.mode=full"}});
  cases.push_back({"llama", 1, {"precision.compute=bf16", "precision.params=bf16"}});
  const size_t stages = 12;  // of the cases above: those come with clipping and without
  for (size_t i = 0; i < stages; i += 2) cases[i].sets.push_back("optim.max_grad_norm=0");
  for (const Case& what : cases) {
    const Counted counted = reads_of(what);
    EXPECT_EQ(counted.reads, 1) << name_of(what);
    for (const auto& [name, count] : counted.operators) ADD_FAILURE() << name_of(what) << ": " << count << " " << name;
    int64_t waits = 0;
    std::string text;
    for (const auto& [name, count] : counted.waits) waits += count, text += " " + std::to_string(count) + " " + name;
    EXPECT_LE(waits, what.ranks) << name_of(what) << ":" << text;
  }
}

// What has to know more in the midst of a step, or how many rows go where.
TEST_F(HostReads, WhatNeedsMoreSaysSo) { EXPECT_EQ(reads_of({"llama", 2, {"mesh.pp=2", "pipeline.schedule=zb_h1", "pipeline.post_validate=true"}}).reads, 2); }

}  // namespace
}  // namespace tessera
