#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/memory/host_link.h"
#include "tessera/nn/names.h"
#include "tessera/optim/optimizer.h"

namespace tessera {

/// An optimizer whose state lies on the host beside the device, and whose update the host's cores make (ZeRO-Offload, arXiv:2101.06840), of parameters that are
/// on the device: whole ones, parts or slices. Per step: each gradient -> the host, while those before it are updated there -> a copy of the parameter on the
/// host -> the parameter. The optimizer inside is any, and updates the copies: its bits are those of one that runs on the host alone.
///
///   state     that of the optimizer inside
///   device    nothing beyond parameters and gradients: with AdamW 8 bytes an element less, 12 less where there are masters
///   host      the state, and the copies (as optimizer state); while it steps, the gradients
///   traffic   an element's gradient out, its parameter in; delayed, the host reads the copies once more before each update, for a hash (all its threads)
/// Copies begin as the parameters are. Who writes these later through libtorch, or gives them other memory, is followed (nn::WriteMark), and so is whoever
/// loads a checkpoint (set_update_counts). Works on meta. The host reads `skip`, and waits for it.
///
/// Delayed, an update is made on a thread of its own while the next step computes, which has the weights of one update before, and is shown to the parameters
/// when that step's gradients are there: w(t+1) = w(t) + update of the gradient at w(t-1). The first step shows nothing. state() then has the copies as "next",
/// one update ahead of the parameters, and gradients stay on the host until the update is shown. Who writes a parameter that has no update under way (before
/// the first step, or without a gradient in the last) is followed, by state() as well, and so is whoever loads a checkpoint (follow_all_but); what is written
/// otherwise the update under way knows nothing of, and the next step refuses it by name. Where hold_state() was called and nothing came (a load that was
/// refused), all stays as it was. An update is shown also to what was frozen since, and said of it (nn::note_late_update). The thread computes as the one that
/// called step() does: threads, kernels, products, memory that is counted.
class HostOptimizer final : public optim::Optimizer {
 public:
  /// Makes the optimizer inside, of the copies that it is handed.
  using Build = std::function<std::unique_ptr<optim::Optimizer>(const std::vector<nn::NamedParameter>& copies)>;

  /// Of parameters that are updated, and then copied back, together.
  static constexpr int64_t kPieceBytes = int64_t{64} << 20;

  HostOptimizer(const std::vector<nn::NamedParameter>& parameters, at::Device device, const Build& build, int64_t piece_bytes = kPieceBytes,
                bool delayed = false);

  std::string kind() const override { return inner_->kind(); }
  std::map<std::string, std::string> kinds() const override { return inner_->kinds(); }
  std::vector<optim::StateTensor> state() const override;
  std::vector<optim::StateTensor> state_to_save() const override;
  std::vector<optim::StateTensor> state_at_hand() const override { return inner_->state_at_hand(); }
  bool needs_begin() const override { return true; }
  bool updates_late() const override { return delayed_; }
  std::set<std::string> needs_wholes() const override { return inner_->needs_wholes(); }
  void meet_nobody() override { inner_->meet_nobody(); }
  bool updates_in_one_pass() const override { return inner_->updates_in_one_pass(); }
  void hold_state(const std::map<std::string, int64_t>& counts) override;
  void follow_all_but(const std::set<std::string>& ahead) override;

 private:
  /// Of a parameter: its like on the host, and what is on its way there.
  struct Beside {
    at::Tensor copy;              ///< in the parameter's shape
    nn::WriteMark writes{};       ///< of the parameter, when it was last what the copy is, or what a delayed update began with; of none: not known
    uint64_t values = 0;          ///< hash of what a delayed update began with
    at::Tensor gradient{};        ///< while a step is made
    CopyStream::Point arrived{};  ///< it
  };

  void prepare(const std::vector<Batch>& batches) override;
  void update(const Batch& batch) override;
  void counts_changed() override;
  void end_loading();
  void take_type(size_t index);
  void follow(size_t index) const;
  void refuse_written(size_t index) const;
  void mark(size_t index);
  void send_gradient(size_t index, const at::Tensor& gradient);
  void update_later(const Batch& batch);
  void await_update() const;
  std::vector<optim::StateTensor> with_next(std::vector<optim::StateTensor> state, const std::vector<size_t>& loading) const;
  void show_update();
  void end_return();

  HostLink link_;
  int64_t piece_bytes_;
  std::vector<Beside> beside_;  ///< for each of parameters_
  std::unique_ptr<optim::Optimizer> inner_;
  bool delayed_;
  std::vector<size_t> ahead_;            ///< parameters whose copies are one update ahead
  std::vector<size_t> loading_;          ///< those that hold_state() has named, until something was loaded, or a step is made
  mutable std::future<void> under_way_;  ///< of these, where a thread still works on them
};

}  // namespace tessera
