#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

/// Several optimizers as one, each of parameters of its own: what optim.groups makes where parameters differ in more than learning rate and decay.
class Several final : public Optimizer {
 public:
  /// `kind`: what optim.name calls all of them together.
  Several(std::string kind, std::vector<std::unique_ptr<Optimizer>> optimizers);

  std::string kind() const override { return kind_; }
  void take_back_count() override;
  void remember_counts() override;
  void begin(double lr) override;
  void apply(const UpdateTerms& terms) override;
  bool needs_begin() const override;
  bool skips_on_device() const override;
  bool updates_in_one_pass() const override;
  std::vector<StateTensor> state() const override;
  void hold_state(const std::map<std::string, int64_t>& counts) override;
  std::map<std::string, int64_t> update_counts() const override;
  void set_update_counts(const std::map<std::string, int64_t>& counts) override;

 private:
  void update(const Batch& /*batch*/) override {}  // begin() and apply() ask the optimizers

  std::string kind_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;
};

}  // namespace tessera::optim
