#include "tessera/nn/dropout.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/kernels/dropout.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/sample_scope.h"

namespace tessera::nn {

void DrawsMasks::set_replica(int64_t replica, int64_t ranks, std::weak_ptr<const void> by) {
  std::erase_if(claims_, [](const Claim& claim) { return claim.by.expired(); });
  claims_.push_back({replica, ranks, std::move(by)});
}

int64_t DrawsMasks::replica() const {
  const Claim* most = nullptr;
  for (const Claim& claim : claims_) {
    if (!claim.by.expired() && (most == nullptr || claim.ranks >= most->ranks)) most = &claim;
  }
  return most == nullptr ? 0 : most->replica;
}

DropoutImpl::DropoutImpl(double p) : p(p) { require(p >= 0 && p < 1, "Dropout: p = ", p, " must be at least 0 and below 1"); }

at::Tensor DropoutImpl::forward(const at::Tensor& x) {
  if (bypassed(*this)) return call(*this, x);
  if (!is_training() || p == 0) return x;
  require(x.dim() >= 2, "Dropout '", path(), "': an input of shape ", x.sizes(), " has no sample and feature dimensions; it takes [B, S, D] or [B, D]");
  const SampleContext& here = SampleScope::current();
  return drop_by_place(x, p, path(), "@" + std::to_string(replica()), {.offset = here.first_feature, .total = here.features});
}

void DropoutImpl::pretty_print(std::ostream& stream) const { stream << "tessera::nn::Dropout(p=" << p << ")"; }

at::Tensor drop_by_place(const at::Tensor& x, double p, const std::string& name, const std::string& apart, const kernels::FeatureBlock& columns) {
  const auto& context = SampleScope::current();
  const bool counts_columns = context.seq_len > 0 || context.positions.defined() || context.first_column > 0 || context.columns;
  require(
      x.dim() <= 3 || !counts_columns, "Dropout '", name, "': an input of shape ", x.sizes(),
      " has no one dimension of columns, and the sample scope says how long a sequence is, or which part of one this is (SampleContext::seq_len, positions, "
      "context_parallel, SequenceParallel): masks would not be those of the whole. Give it [B, S, D], of heads by flatten(-2), or of weights of attention "
      "take torch::nn::Dropout, whose masks are of the generator");
  const int64_t batch = x.size(0), sample_columns = x.numel() == 0 ? 0 : x.numel() / (batch * x.size(-1));
  const bool placed = context.step != 0 || x.is_meta();
  const CounterRng rng = placed ? CounterRng(context.seed, name + "/" + std::to_string(context.step)) : CounterRng(MaskKeys::next(), name + apart);
  return kernels::dropout(x, p, rng.key(), SampleScope::token_rows(batch, sample_columns, x.device()), columns);
}

namespace {

std::vector<DrawsMasks*> drawing_in(torch::nn::Module& module) {
  std::vector<DrawsMasks*> found;
  if (auto* draws = dynamic_cast<DrawsMasks*>(&module)) found.push_back(draws);
  const auto* const own = dynamic_cast<const Module*>(&module);
  if (own == nullptr || own->chain() == nullptr) return found;
  for (const auto& interceptor : *own->chain()) {
    if (auto* draws = dynamic_cast<DrawsMasks*>(interceptor.get())) found.push_back(draws);
  }
  return found;
}

}  // namespace

bool draws_masks(Module& module) { return !drawing_in(module).empty(); }

std::shared_ptr<const void> drop_apart(torch::nn::Module& root, int64_t replica, int64_t ranks) {
  const auto by = std::make_shared<const char>();
  root.apply([&](torch::nn::Module& module) {
    for (DrawsMasks* const draws : drawing_in(module)) draws->set_replica(replica, ranks, by);
  });
  return by;
}

}  // namespace tessera::nn
