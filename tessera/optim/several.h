#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

/// Several optimizers as one, each of parameters of its own: what optim.groups makes where parameters differ in more than learning rate and decay, and what
/// offload makes of those that lie at several places.
class Several final : public Optimizer {
 public:
  struct Part {
    std::unique_ptr<Optimizer> optimizer;
    bool on_host = false;  ///< what it updates lies on the host beside the device, and so do whatever it allocates (HostMemory) and the number that says `skip`
  };

  /// `kind`: what optim.name calls all of them together.
  Several(std::string kind, std::vector<Part> parts);

  std::string kind() const override { return kind_; }
  std::map<std::string, std::string> kinds() const override;
  void take_back_count() override;
  void remember_counts() override;
  void begin(double lr) override;
  void apply(const UpdateTerms& terms) override;
  bool needs_begin() const override;
  bool updates_late() const override;
  std::set<std::string> needs_wholes() const override;
  void meet_nobody() override;
  bool skips_on_device() const override;
  bool updates_in_one_pass() const override;
  bool writes_rounded() const override;
  std::vector<StateTensor> state() const override;
  std::vector<StateTensor> state_to_save() const override;
  std::vector<StateTensor> state_at_hand() const override;
  void hold_state(const std::map<std::string, int64_t>& counts) override;
  void follow_all_but(const std::set<std::string>& ahead) override;
  std::map<std::string, int64_t> update_counts() const override;
  void set_update_counts(const std::map<std::string, int64_t>& counts) override;

 private:
  void update(const Batch& /*batch*/) override {}  // begin() and apply() ask the optimizers

  template <class Tell>
  void tell(Tell&& tell) const;
  template <class Ask>
  std::vector<StateTensor> all_of(Ask&& ask) const;

  std::string kind_;
  std::vector<Part> parts_;
};

}  // namespace tessera::optim
