#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/comm/world.h"
#include "tessera/config/config.h"
#include "tessera/data/corpus.h"
#include "tessera/data/loader.h"
#include "tessera/mesh/mesh.h"
#include "tessera/train/forward_engine.h"

namespace tessera {

/// A checkpoint records losses that whoever loads it must find again: hashes say that the bytes are those that were written, not that model, data and
/// arithmetic are those that wrote them.
///
/// record() runs the first micro-batch that each data rank would take next through the model as it is saved, in evaluation mode and without a graph
/// (nothing of the run changes), and records each loss with the micro-batch's index in the step. check() runs as many of them as there are data ranks now,
/// each in the recorded micro_size, and compares: bit for bit where the same arithmetic meets the same micro-batch (threads per rank, kernels, precision, mesh
/// axes that cut the model, processor; on all ranks, then and now), else within replay_bound(). Where layers are cut, what orders the sums over their ranks is
/// part of it: the engine, the collective algorithms, which ranks share a host, and whether the sequence is cut or products overlap. Since the loss of a
/// micro-batch does not depend on how the others are dealt, a run on another number of data ranks, or with another sharding, is compared bit for bit too.
///
/// Both are collective over `mesh`. Cost: one forward of one micro-batch on each rank, at each save and once after a load, and two all-gathers of 8 bytes.
/// What it cannot see: the optimizer's state, which only hashes guard.
class Replay {
 public:
  /// Collective over the ranks that layers are cut over.
  Replay(const Config& config, const Mesh& mesh, std::shared_ptr<const data::Corpus> corpus, const comm::WorldOptions& options = {});

  /// What a checkpoint at `cursor` keeps as progress.replay; with "not_finite" where one of the losses is not:
  /// whether the weights make no number of any text that was tried, of these micro-batches and of those of two later steps.
  nlohmann::json record(ForwardEngine& engine, const data::Cursor& cursor) const;

  /// How a replay went.
  struct Result {
    int64_t micro_batches = 0;  ///< compared; 0: the checkpoint records none, or none that can be
    int64_t overflowed = 0;     ///< not compared: in fp16, and another arithmetic, the recorded loss or that of now is not finite
    bool bits = false;          ///< compared bit for bit
  };

  /// `cursor` is the recorded one: this run's batch and windows may be others. Throws ConfigError, on every rank the same, naming `source`, the micro-batch and
  /// both losses where one differs; where the weights made no number when they were recorded; and where the record cannot be read.
  Result check(ForwardEngine& engine, const data::Cursor& cursor, const nlohmann::json& progress, const std::string& source) const;

 private:
  /// Each data rank's loss of the micro-batch `index` that it asks for, of the step at the cursor or of one so many later.
  std::vector<double> losses_of(ForwardEngine& engine, const data::Cursor& cursor, int64_t micro_size, int64_t index, int64_t later = 0) const;
  /// What must be equal for the bits to be: this rank's, and whether it is all ranks'. Collective.
  nlohmann::json arithmetic(at::Device device) const;

  const Config& config_;
  const Mesh& mesh_;
  std::shared_ptr<const data::Corpus> corpus_;
  nlohmann::json sums_;  ///< what orders the sums over ranks that layers are cut over; null where they are whole
};

/// How a replay went, as what is said of the checkpoint.
std::string in_words(const Replay::Result& result);

/// The precision.compute that the saved run computed in, whatever it was asked for ("auto"); nothing where a checkpoint records no step to replay.
std::optional<std::string> recorded_compute(const nlohmann::json& progress);

/// How far, relatively, a loss may be off that other arithmetic computed: as the coarsest of these number formats allows (fp32: 5e-6).
double replay_bound(const std::vector<std::string>& formats);

}  // namespace tessera
