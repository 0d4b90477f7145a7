#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/memory/host_link.h"
#include "tessera/optim/optimizer.h"

namespace tessera {

/// An optimizer whose state lies on the host beside the device, and whose update the host's cores make (ZeRO-Offload, arXiv:2101.06840), of parameters that are
/// on the device: whole ones, parts or slices. Per step: each gradient -> the host, while those before it are updated there -> a copy of the parameter on the
/// host -> the parameter. The optimizer inside is any, and updates the copies: its bits are those of one that runs on the host alone.
///
///   state     that of the optimizer inside
///   device    nothing beyond parameters and gradients: with AdamW 8 bytes an element less, 12 less where there are masters
///   host      the state, and the copies (as optimizer state); while it steps, the gradients
///   traffic   an element's gradient out, its parameter in
/// Copies begin as the parameters are. Who writes these later through libtorch is followed, as its version counter tells, and so is whoever loads a checkpoint
/// (set_update_counts). Works on meta. The host reads `skip`, and waits for it.
class HostOptimizer final : public optim::Optimizer {
 public:
  /// Makes the optimizer inside, of the copies that it is handed.
  using Build = std::function<std::unique_ptr<optim::Optimizer>(const std::vector<nn::NamedParameter>& copies)>;

  /// Of parameters that are updated, and then copied back, together.
  static constexpr int64_t kPieceBytes = int64_t{64} << 20;

  HostOptimizer(const std::vector<nn::NamedParameter>& parameters, at::Device device, const Build& build, int64_t piece_bytes = kPieceBytes);

  std::string kind() const override { return inner_->kind(); }
  std::vector<optim::StateTensor> state() const override { return inner_->state(); }
  bool needs_begin() const override { return true; }
  void hold_state(const std::map<std::string, int64_t>& counts) override;

 private:
  /// Of a parameter: its like on the host, and what is on its way there.
  struct Beside {
    at::Tensor copy;                    ///< in the parameter's shape
    std::optional<uint32_t> version{};  ///< of the parameter, when it was last what the copy is; nothing: not known
    at::Tensor gradient{};              ///< while a step is made
    CopyStream::Point arrived{};        ///< it
  };

  void prepare(const std::vector<Batch>& batches) override;
  void update(const Batch& batch) override;
  void counts_changed() override;
  void follow(size_t index);
  void send_gradient(size_t index, const at::Tensor& gradient);
  size_t piece_end(const Batch& batch, size_t begin) const;

  HostLink link_;
  int64_t piece_bytes_;
  std::vector<Beside> beside_;  ///< for each of parameters_
  CopyStream::Point returned_;  ///< all parameters of the last update
  std::unique_ptr<optim::Optimizer> inner_;
};

}  // namespace tessera
