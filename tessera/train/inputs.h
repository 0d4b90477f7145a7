#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/run_lock.h"
#include "tessera/comm/world.h"
#include "tessera/config/config.h"
#include "tessera/data/corpus.h"
#include "tessera/data/tokenizer.h"

namespace tessera {

/// Reads a configuration as `train` and `plan` take it: file, `--set`, from_hf's shape and tokenizer, defaults that follow from other fields.
Config read_config(const std::filesystem::path& file, const std::vector<std::string>& sets);

/// A checkpoint that a run goes on from, with its manifest read and found whole.
struct ResumePoint {
  std::filesystem::path folder;
  checkpoint::Manifest manifest;
  bool hashed = false;  ///< the hash of each of its slices has been checked, so whoever loads them need not
  bool newest = false;  ///< found by `latest`: an older one will do where it turns out to be damaged
};

/// Whether model.from_hf and lora.from_peft are read: by a run that begins, and by one that goes on from a checkpoint that may lack some of the model, which
/// then begins as it would without it.
bool reads_starting_files(const Config& config, const std::optional<ResumePoint>& resume);

/// What a run needs from disk. Opening it checks everything that is knowable from configuration, manifests and file sizes: no process group
/// exists yet, so a refusal is one line of one process.
struct Inputs {
  std::unique_ptr<data::Tokenizer> tokenizer;
  std::shared_ptr<const data::Corpus> corpus;
  std::shared_ptr<const data::Corpus> validation;  ///< null without validation_files
  std::optional<ResumePoint> resume;
  std::vector<std::string> remarks;           ///< to be said aloud once: checkpoints that were passed over, a fresh start
  std::vector<std::string> text_remarks{};    ///< of tokenizer and texts: the same for each rank and start of a run, so to be said by the first alone
  bool may_start_afresh = false;              ///< `latest` was asked for, and found none: what cannot be used in checkpoint.dir is set aside
  std::string job{};                          ///< OpenOptions::job
  bool restarted = false;                     ///< OpenOptions::restarted
  std::unique_ptr<checkpoint::RunLock> lock;  ///< of checkpoint.dir; null until lock_checkpoint_dir, and on all ranks but the first
};

/// Who a process that opens inputs is.
struct OpenOptions {
  /// A launcher started this attempt after another: where there is a checkpoint.dir, `latest` is implied, and a named checkpoint.resume stands for the newest
  /// checkpoint there that went on from it.
  bool restarted = false;
  /// Environment::job. Where it is known, what a restart finds so is of this job alone: what others wrote, its first attempt may not yet have set aside.
  std::string job{};
  std::filesystem::path hashed{};  ///< a checkpoint whose hashes the process that started this one has just checked; empty: none
  bool one_of_several = false;     ///< check_hashes() will follow, which shares the reading between ranks
};

/// Opens text, tokenizer and checkpoint of a validated configuration. With checkpoint.verify a checkpoint is read whole to be hashed, here (but for what
/// `options` says) and not again on loading. Throws ConfigError.
Inputs open_inputs(const Config& config, const OpenOptions& options = {});

/// Checks the hashes that open_inputs() has left; collective over the world. Each rank reads its part of the checkpoint among the ranks of its host, so that
/// every host has seen every byte once. Where one is damaged, all ranks go on from the newest older one that is not, and remark it, or, where it was named,
/// refuse it. Throws ConfigError; also where ranks do not see the same checkpoint.
void check_hashes(Inputs& inputs, const Config& config, const comm::World& world);

/// What checkpoint.partial makes of a checkpoint, by names of the whole model's parameters and buffers: those that are loaded, those that begin anew, and what
/// the checkpoint has beyond them, which is left unread. Weights in fewer bits, which no checkpoint holds, are none of these.
struct PartialLoad {
  std::vector<std::string> loaded, fresh, unread;
};
PartialLoad partial_load(const checkpoint::Manifest& saved, const Config& config);
/// The sentence about it, of the checkpoint `folder`; empty: all is loaded.
std::string partial_remark(const PartialLoad& found, const std::string& folder);

/// Why the numbers of a run that goes on are not those that were recorded when its checkpoint was saved, as checkpoint.partial allows; empty: they are.
std::string other_model(const ResumePoint& resume, const Config& config);

/// What a run that goes on does otherwise than the one that saved, to be said aloud once: settings, what checkpoint.partial leaves out, and what more steps
/// make of the learning rate.
std::vector<std::string> changes_since(const ResumePoint& resume, const Config& config);

/// Of an asynchronous schedule, whose updates sum micro-batches of all data ranks: that on `world_size` ranks an update has another number of samples than
/// where the checkpoint was saved, which is another run from here on; empty: it has as many.
std::string other_update(const ResumePoint& resume, const Config& config, int world_size);

/// Refuses a checkpoint.dir that holds checkpoints of another run, unless checkpoint.replace says that they may be set aside. Reads only. Throws ConfigError.
void check_checkpoint_dir(const Config& config, const Inputs& inputs);

/// How long a run waits for the locks of another: a moment, for one that is being ended. A restart's may be those of its own last attempt on a host that is
/// gone, which a file server keeps (NFS 4: 90 s); so it waits for two minutes, or for three quarters of comm.timeout_s, as the other ranks wait meanwhile.
std::chrono::milliseconds lock_patience(const Config& config, bool restarted);

/// Takes checkpoint.dir for this run, where there is one: for the first rank, before it meets the others. Waits as lock_patience() says. Throws ConfigError
/// where another live run has it, or nothing can be written there. Before check_checkpoint_dir: a live run comes first of what may be in the way.
void lock_checkpoint_dir(const Config& config, Inputs& inputs);

/// On the rank that holds the lock, before a save: where its lock, or the folder, was taken away meanwhile, so that nothing keeps another run out, takes
/// checkpoint.dir anew. Returns the remark that says so. Throws Error where another live run has the place by now, or nothing can be written there.
std::vector<std::string> hold_on_to_checkpoint_dir(const Config& config, Inputs& inputs);

/// Who this run is: the one that it goes on from, started anew, or a fresh one.
checkpoint::RunIdentity run_identity(const Inputs& inputs);

/// On the rank that holds the lock, before the first save: checkpoint.dir as `run` goes on from there. What is in it and not on the run's line (later steps,
/// where it goes back; another run's, where checkpoint.replace says so) is set aside within it; returned is the remark that tells where. Throws Error.
std::vector<std::string> enter_checkpoint_dir(const Config& config, const Inputs& inputs, const checkpoint::RunIdentity& run);

/// What stands for the data in a checkpoint's agreement: text and tokenizer by content, and whether documents begin with its beginning-of-text id.
nlohmann::json data_identity(const data::Corpus& corpus);

}  // namespace tessera
