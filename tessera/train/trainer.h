#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/core/config.h"
#include "tessera/data/loader.h"
#include "tessera/mesh/mesh.h"
#include "tessera/train/inputs.h"
#include "tessera/train/observer.h"
#include "tessera/train/stepper.h"
#include "tessera/train/stragglers.h"

namespace tessera {

/// `--dump-step K --dump-dir DIR`: the logical gradients of step K before clipping, and the weights after its update.
struct DumpRequest {
  int64_t step = 0;
  std::filesystem::path dir;
};

/// Trains one rank from its first step (or the resumed one) to run.steps. Collective over the world.
class Trainer {
 public:
  /// `config` must be validated for this world, `inputs` opened from it.
  Trainer(Config config, comm::World& world, Inputs inputs, std::optional<DumpRequest> dump = std::nullopt);

  /// Hears of the run on rank 0; other ranks drop it.
  void add_observer(std::unique_ptr<Observer> observer);

  /// `signal` is asked after each step whether this rank is to stop: a signal's number, or 0. One rank is enough for all to stop after the same step, save
  /// (where there is a checkpoint.dir) and return from run(). It need not be set on every rank, nor to the same.
  void stop_when(std::function<int()> signal) { stop_signal_ = std::move(signal); }

  /// Throws what a rank may meet; nothing that was saved is lost then.
  void run();

 private:
  RunInfo info() const;
  void train_to_the_end(RunEnd& end);
  StepResult step();
  void name_stragglers(const std::vector<RankTimes>& ranks);
  void validate_model(int64_t step);
  void save(int64_t step);
  std::string stop_reason() const;
  void dump_gradients() const;
  void dump_weights() const;
  bool due(int64_t every, int64_t step) const { return (every > 0 && step % every == 0) || step == config_.run.steps; }

  Config config_;
  comm::World& world_;
  Inputs inputs_;
  std::optional<DumpRequest> dump_;
  std::vector<std::string> hosts_;  ///< of all ranks
  Mesh mesh_;
  RankScope scope_;
  Stepper stepper_;
  data::Loader loader_;
  StragglerWatch stragglers_;
  std::function<int()> stop_signal_;
  std::optional<StopRequest> stop_;  ///< what the last step learned
  std::vector<std::unique_ptr<Observer>> observers_;
};

}  // namespace tessera
