#include "tessera/fsdp/fully_shard.h"

#include <algorithm>
#include <optional>

#include "tessera/comm/call_site.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/call_trigger.h"
#include "tessera/fsdp/initialize.h"
#include "tessera/fsdp/operator_trigger.h"
#include "tessera/fsdp/sharded_step.h"
#include "tessera/fsdp/sharded_units.h"
#include "tessera/fsdp/unit_plan.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/module.h"
#include "tessera/nn/operators.h"

namespace tessera {
namespace {

void check_dtype(const char* option, const std::optional<at::ScalarType>& dtype) {
  if (!dtype) return;
  require(at::isFloatingType(*dtype), "fully_shard: ", option, " = ", *dtype, " is no floating-point type; use Float, BFloat16 or Half");
}

void check_dtypes(const FullyShardOptions& options) {
  check_dtype("param_dtype", options.param_dtype);
  check_dtype("reduce_dtype", options.reduce_dtype);
  check_dtype("gradient_dtype", options.gradient_dtype);
}

void check_unit_sizes(const UnitPlan& plan, const FullyShardOptions& options) {
  if (options.unit_bytes_limit <= 0) return;
  std::vector<int64_t> bytes;
  for (const auto& unit : plan.units) bytes.push_back(gathered_bytes(unit, options));
  const auto largest = std::ranges::max_element(bytes);
  const auto& unit = plan.units[largest - bytes.begin()];
  const auto parameter = std::ranges::max_element(unit.parameters, {}, [](const nn::NamedParameter& p) { return p.tensor.numel(); });
  require(*largest <= options.unit_bytes_limit, "fully_shard: unit '", unit.name, "' (with '", parameter->name, "') alone takes ", *largest,
          " bytes while it is gathered, more than unit_bytes_limit (run.memory_limit_bytes) = ", options.unit_bytes_limit,
          "; wrap smaller modules (wrap, policy; zero.wrap), gather in a smaller type (param_dtype; precision.compute), or raise the limit");
}

/// Those whose calls would be needed and cannot be intercepted.
std::string uninterceptable(const UnitPlan& plan) {
  for (const auto& owner : plan.owners) {
    if (!owner.units.empty() && dynamic_cast<const nn::Module*>(owner.module.get()) == nullptr) return owner.path.empty() ? "(root)" : owner.path;
  }
  return "";
}

bool has_values(const torch::nn::Module& module) {
  return std::ranges::none_of(nn::unique_parameters(module), [](const nn::NamedParameter& parameter) { return parameter.tensor.is_meta(); });
}

}  // namespace

class FullyShardedDataParallel::Impl {
 public:
  Impl(torch::nn::Module& module, comm::Group group, FullyShardOptions options) : module_(module), group_(std::move(group)), options_(std::move(options)) {
    check_dtypes(options_);
    nn::assign_paths(module_);
    UnitPlan plan = plan_units(module_, options_);  // refuses what it refuses in a group of one, too
    check_unit_sizes(plan, options_);
    if (!active()) {
      if (options_.init) initialize_whole(plan);
      return;
    }
    const comm::CallSite site("fsdp.start");
    if (has_values(module_)) {
      equalize_replicas(module_, group_, options_.replicas);
      equalize_replicas(module_, options_.replicate, options_.replicas);
    }
    units_.emplace(plan, group_, options_);
    if (options_.init) initialize_units(module_, plan, *units_, options_);
    step_.emplace(*units_, group_, options_);
    choose_trigger(std::move(plan));
  }

  void begin_step() {
    if (!active()) {
      for (const auto& parameter : nn::unique_parameters(module_)) set_gradient(parameter.tensor, {});
      return;
    }
    scope_.reset();
    step_->begin();
    watch();
  }

  void set_last(bool last) {
    if (active()) step_->begin_micro_batch(last);
  }

  void finish() {
    if (!active()) return;
    scope_.reset();
    step_->finish();
  }

  void begin_evaluation() {
    if (!active() || !operators_) return;
    for (size_t unit = 0; unit < units_->size(); ++unit) units_->show_whole(unit);
    watch();
  }

  void end_evaluation() {
    if (!active() || !operators_) return;
    scope_.reset();
    units_->release_all();
    for (size_t unit = 0; unit < units_->size(); ++unit) units_->show_slices(unit);
  }

  const SynchronizationStatistics& statistics() const { return active() ? units_->statistics() : none_; }
  const comm::Group& group() const { return group_; }

  std::vector<int64_t> held_elements(int rank) const {
    std::vector<int64_t> held;
    for (size_t unit = 0; active() && unit < units_->size(); ++unit) {
      for (const FlatParameters& flat : units_->flats(unit)) {
        for (size_t i = 0; i < flat.parameters().size(); ++i) held.push_back(elements_of(flat.layout(), i, rank));
      }
    }
    return held;
  }

  std::vector<ShardUnit> units() const {
    std::vector<ShardUnit> described;
    if (!active()) return described;
    for (size_t unit = 0; unit < units_->size(); ++unit) {
      ShardUnit& one = described.emplace_back();
      one.name = units_->name(unit);
      for (const FlatParameters& flat : units_->flats(unit)) {
        for (const auto& parameter : flat.parameters()) one.parameters.push_back(parameter.name);
        one.numel += flat.layout().numel();
        one.gathered_bytes += flat.gathered_bytes();
        one.local_bytes += flat.local_bytes();
      }
    }
    return described;
  }

 private:
  bool active() const { return group_.size() > 1 || options_.replicate.size() > 1 || options_.offload != Offload::None; }

  void choose_trigger(UnitPlan plan) {
    const std::string plain = uninterceptable(plan);
    require(plain.empty() || options_.trigger != ShardTrigger::Calls, "fully_shard: calls of '", plain,
            "' cannot be intercepted, for it is a plain torch::nn::Module; derive it from tessera::nn::Module, or let operators trigger the gathers "
            "(ShardTrigger::Operators)");
    if (plain.empty() && options_.trigger != ShardTrigger::Operators) {
      nn::check_no_bypass(module_);
      attached_ = CallTrigger::attach(std::make_shared<CallTrigger>(std::move(plan), *units_, *step_, options_.reshard_after_forward));
      return;
    }
    require(options_.reshard_after_forward, "fully_shard: reshard_after_forward = false needs calls that can be intercepted; '",
            plain.empty() ? "the module" : plain, "' is watched by its operators, which do not tell where forward ends");
    operators_ = std::make_shared<OperatorTrigger>(*units_, *step_);
    step_->retire_when_complete();
  }

  void watch() {
    if (operators_) scope_ = std::make_unique<nn::OperatorScope>(operators_);
  }

  void initialize_whole(const UnitPlan& plan) {
    const at::NoGradGuard no_grad;
    give_memory(module_, options_.device);
    for (const auto& holder : plan.holders) options_.init(*holder.module, holder.path);
  }

  torch::nn::Module& module_;
  comm::Group group_;
  FullyShardOptions options_;
  std::optional<ShardedUnits> units_;
  std::optional<ShardedStep> step_;
  std::shared_ptr<OperatorTrigger> operators_;
  std::unique_ptr<nn::OperatorScope> scope_;
  Attachment attached_;
  SynchronizationStatistics none_;
};

FullyShardedDataParallel::FullyShardedDataParallel(torch::nn::Module& module, comm::Group group, FullyShardOptions options)
    : impl_(std::make_unique<Impl>(module, std::move(group), std::move(options))) {}
FullyShardedDataParallel::~FullyShardedDataParallel() = default;

void FullyShardedDataParallel::begin_step() { impl_->begin_step(); }
void FullyShardedDataParallel::before_micro_batch(const MicroBatchPosition& position) { impl_->set_last(position.last); }
void FullyShardedDataParallel::after_micro_batch(const MicroBatchPosition&) {}
void FullyShardedDataParallel::set_last_micro_batch(bool last) { impl_->set_last(last); }
void FullyShardedDataParallel::finish() { impl_->finish(); }
void FullyShardedDataParallel::begin_evaluation() { impl_->begin_evaluation(); }
void FullyShardedDataParallel::end_evaluation() { impl_->end_evaluation(); }
const SynchronizationStatistics& FullyShardedDataParallel::statistics() const { return impl_->statistics(); }
std::vector<int64_t> FullyShardedDataParallel::held_elements(int rank) const { return impl_->held_elements(rank); }
std::vector<ShardUnit> FullyShardedDataParallel::units() const { return impl_->units(); }
const comm::Group& FullyShardedDataParallel::group() const { return impl_->group(); }

std::unique_ptr<FullyShardedDataParallel> fully_shard(torch::nn::Module& module, comm::Group group, FullyShardOptions options) {
  return std::make_unique<FullyShardedDataParallel>(module, std::move(group), std::move(options));
}

}  // namespace tessera
