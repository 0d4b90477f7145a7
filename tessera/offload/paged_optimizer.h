#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/offload/activations.h"
#include "tessera/optim/optimizer.h"

namespace tessera {

namespace offload {
struct Depot;
class ParkedStorage;
}  // namespace offload

struct PagedOptimizerOptions {
  OffloadPlace place = OffloadPlace::Host;  ///< where state waits
  std::filesystem::path dir = {};           ///< for Disk: folder of the file that holds it
  DiskBytes disk = {};                      ///< is told what that file takes
  int64_t piece_bytes = int64_t{64} << 20;  ///< of parameters whose state is there together
};

/// An optimizer whose state waits elsewhere and comes to its parameters, piece by piece, to be updated there (ZeRO-Infinity, arXiv:2104.07857): on a device
/// from the host or from disk, on the host from disk. The optimizer inside is any that needs nothing but its own elements of a parameter's state, and its bits
/// are those that it has by itself.
///
/// Per step and piece: state in, while the piece before is updated; the update; state out. State is made with a parameter's first update.
///   where it is updated    the state of a piece, and of one that comes
///   host                   Host: all state. Disk: what is on its way, two tensors out and a piece in
///   traffic                an element's state in and out: with AdamW 8 bytes each way, 12 where there are masters
/// state_to_save() leaves it where it is, and brings a tensor at a time to the host: saving needs the room of one. state() brings all of it in, where it stays
/// until the next step, and loading a checkpoint needs that room; but what is updated on the host from disk is then memory that lies in the file, and loading
/// needs the room of a piece. Works on meta.
///
/// Throws ConfigError for a `dir` that cannot be written, and for an optimizer that looks at whole tensors (Adafactor, Adam8bit, Muon) where one is cut; Error,
/// in a step, where the disk is full or cannot be read.
class PagedOptimizer final : public optim::Optimizer {
 public:
  /// Makes the optimizer inside, of tensors that stand for the parameters.
  using Build = std::function<std::unique_ptr<optim::Optimizer>(const std::vector<nn::NamedParameter>& parameters)>;

  PagedOptimizer(const std::vector<nn::NamedParameter>& parameters, const PagedOptimizerOptions& options, const Build& build);
  ~PagedOptimizer() override;

  std::string kind() const override { return inner_->kind(); }
  std::map<std::string, std::string> kinds() const override { return inner_->kinds(); }
  std::vector<optim::StateTensor> state() const override;
  std::vector<optim::StateTensor> state_to_save() const override;
  std::vector<optim::StateTensor> state_at_hand() const override { return {}; }
  bool skips_on_device() const override { return inner_->skips_on_device(); }
  bool updates_in_one_pass() const override { return inner_->updates_in_one_pass(); }
  void hold_state(const std::map<std::string, int64_t>& counts) override;

 private:
  /// A tensor of the inner optimizer's state.
  struct Page {
    at::Tensor tensor;
    std::shared_ptr<offload::ParkedStorage> away{};  ///< null: its memory is there
  };

  void update(const Batch& batch) override;
  void counts_changed() override;
  void adopt_state();
  void fetch_behind(size_t index);
  void bring(size_t index) const;
  void bring_all() const;
  void send(size_t index);

  int64_t piece_bytes_;
  bool on_disk_;
  std::shared_ptr<offload::Depot> depot_;
  std::vector<at::Tensor> stand_ins_;             ///< for each of parameters_: what the optimizer inside updates, on the parameter's memory
  mutable std::vector<std::vector<Page>> pages_;  ///< for each of parameters_; none before there is state
  std::unique_ptr<optim::Optimizer> inner_;
};

}  // namespace tessera
