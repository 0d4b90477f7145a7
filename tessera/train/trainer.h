#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "tessera/checkpoint/saver.h"
#include "tessera/comm/world.h"
#include "tessera/config/config.h"
#include "tessera/data/loader.h"
#include "tessera/mesh/mesh.h"
#include "tessera/train/batch_feed.h"
#include "tessera/train/hot_experts.h"
#include "tessera/train/inputs.h"
#include "tessera/train/memory_watch.h"
#include "tessera/train/observer.h"
#include "tessera/train/replay.h"
#include "tessera/train/stepper.h"
#include "tessera/train/stragglers.h"

namespace tessera {

/// `--dump-step K --dump-dir DIR`: the logical gradients of step K before clipping, and the weights after its update (a delayed one excepted).
struct DumpRequest {
  int64_t step = 0;
  std::filesystem::path dir;
};

/// How closely a run's memory is looked at.
struct MemoryWishes {
  MemoryTracker tracker{};  ///< that counts it: after a failure, whoever kept a copy can ask it what was refused
  bool report = false;      ///< the timeline of one step of rank 0 for observers: the second that is run, or the only one
};

/// Trains one rank from its first step (or the resumed one) to run.steps. Collective over the world.
class Trainer {
 public:
  /// `config` must be validated for this world, `inputs` opened from it; both alike on all ranks, or ConfigError (check_ranks_agree).
  /// `device`: where it trains; unset, what run.device says. It need not be the same on all ranks.
  Trainer(Config config, comm::World& world, Inputs inputs, std::optional<DumpRequest> dump = std::nullopt, MemoryWishes memory = {},
          std::optional<at::Device> device = std::nullopt);

  /// Hears of the run on rank 0; other ranks drop it.
  void add_observer(std::unique_ptr<Observer> observer);

  /// `signal` is asked after each step, and about once a second of a validation, whether this rank is to stop: a signal's number, or 0. One rank is enough for
  /// all to stop after the same step, save (where there is a checkpoint.dir) and return from run(). A validation is given up for it, and made by the run that
  /// goes on (Observer::lacks_validation). It need not be set on every rank, nor to the same.
  void stop_when(std::function<int()> signal) { stop_signal_ = std::move(signal); }

  /// Throws what a rank may meet; nothing that was saved is lost then. A checkpoint that cannot be written is said aloud and training goes on: the next may
  /// fit. Throws Error where the last one, of a run that ends or is asked to stop, is not there, or is of weights
  /// that make no number.
  void run();

 private:
  RunInfo info() const;
  void train_to_the_end(RunEnd& end);
  /// What is missing behind the step that this run goes on from: its validation, and in checkpoint.dir the step itself, if no other will be saved there.
  void make_up_for(int64_t step);
  StepResult step();
  /// Looks at what the steps from now on allocate; a step that is to be reported is taken down.
  void watch_memory(bool reporting);
  std::shared_ptr<const MemoryHistory> end_watch();
  void name_stragglers(const std::vector<RankTimes>& ranks);
  void name_hot_experts(const std::vector<ExpertLoad>& loads);
  /// Unless ranks are asked to stop meanwhile: then stop_ says so.
  void validate_model(int64_t step);
  /// Compares what a checkpoint recorded with what it gives now that it is loaded.
  void replay(const ResumePoint& resume);
  /// Throws, on every rank, where the text is no longer that which the run began with, so that nobody could go on from what is about to be saved, or where
  /// another run has checkpoint.dir by now. Collective.
  void look_around();
  void save(int64_t step);
  /// Waits for a save that is under way and throws where the run's last one failed, or is of weights that make no number.
  void finish_saving();
  void report_saves();
  void release_peers(const std::exception_ptr& failure) const;
  std::string stop_reason() const;
  void dump_gradients() const;
  void dump_weights() const;
  bool due(int64_t every, int64_t step) const { return (every > 0 && step % every == 0) || step == config_.run.steps; }
  bool validates(int64_t step) const { return inputs_.validation && config_.run.validate_every > 0 && due(config_.run.validate_every, step); }

  at::Device device_;
  Config config_;
  comm::World& world_;
  Inputs inputs_;
  checkpoint::RunIdentity identity_;  ///< of rank 0
  std::optional<DumpRequest> dump_;
  std::vector<std::string> hosts_;  ///< of all ranks
  Mesh mesh_;
  RankScope scope_;
  std::unique_ptr<MemoryWatch> watch_;  ///< before the stepper, whose scopes may still be open when a step fails
  std::string quantized_from_;          ///< what frozen weights in fewer bits are made of when the stepper makes them; their files may go, or change
  Stepper stepper_;
  BatchFeed feed_;
  StragglerWatch stragglers_;
  HotExpertWatch hot_experts_;
  Replay replay_;
  int64_t reported_step_ = 0;                 ///< whose memory observers hear of; 0: none
  std::unique_ptr<checkpoint::Saver> saver_;  ///< null without checkpoint.dir
  double save_blocked_s_ = 0;                 ///< since the last step's report
  checkpoint::SaveOutcome last_save_;
  bool validation_changed_ = false;  ///< its file was written over, which has been said
  int64_t lost_save_ = 0;            ///< the step of the last save, where its replay gives no number; else 0
  std::function<int()> stop_signal_;
  std::optional<StopRequest> stop_;  ///< what the last step learned, or the validation behind it
  std::vector<std::unique_ptr<Observer>> observers_;
};

}  // namespace tessera
