#include "tessera/models/kv_cache.h"

#include <algorithm>
#include <vector>

#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/sample_scope.h"

// The attention core takes keys and values longer than its queries as a context that ends with them, so a cache is an interceptor in front of it and no model
// needs to know. Memory is made when it is first known how many rows and heads are here, and of which dtype.

namespace tessera {

/// Around one attention core: adds the new keys and values to the earlier ones and attends to all.
class KvCache::Layer : public nn::Interceptor {
 public:
  explicit Layer(std::shared_ptr<const State> state) : state_(std::move(state)), kept_(static_cast<size_t>(state_->places)) {}

  nn::Values call(nn::Module& /*module*/, nn::Values inputs, const nn::Next& next) override {
    if (state_->place < 0) return next(std::move(inputs));
    auto& [keys, values] = kept_.at(static_cast<size_t>(state_->place));
    inputs[1] = extend(keys, inputs[1].toTensor());
    inputs[2] = extend(values, inputs[2].toTensor());
    inputs[3] = c10::IValue();  // positions: the columns are all there, in order
    return next(std::move(inputs));
  }

 private:
  at::Tensor extend(at::Tensor& kept, const at::Tensor& added) {
    const bool other_rows = kept.defined() && state_->begin == 0 && kept.size(0) != added.size(0);
    if (!kept.defined() || other_rows) kept = at::empty({added.size(0), state_->capacity, added.size(2), added.size(3)}, added.options());
    kept.narrow(1, state_->begin, added.size(1)).copy_(added);
    return kept.narrow(1, 0, state_->begin + added.size(1));
  }

  std::shared_ptr<const State> state_;
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  ///< of each place: keys and values, [rows, capacity, K, D / H]
};

KvCache::KvCache(LanguageModel& model, int places, int64_t capacity) : state_(std::make_shared<State>()) {
  state_->places = places;
  state_->capacity = capacity > 0 ? capacity : model.max_seq_len();
  require(state_->capacity <= model.max_seq_len(), "KvCache: a capacity of ", capacity, " tokens is more than model.max_seq_len = ", model.max_seq_len());
  const std::string pattern = model.attention_pattern();
  const auto modules = model.named_modules("", /*include_self=*/false);  // a stage without blocks has no attention
  const bool attends = std::ranges::any_of(modules, [&](const auto& module) { return nn::matches(pattern, module.key()); });
  if (!pattern.empty() && attends) attached_ = nn::attach(model, pattern, [&](nn::Module&) { return std::make_shared<Layer>(state_); });
}

KvCache::~KvCache() = default;

KvCache::Reading::Reading(KvCache& cache, int place, int64_t begin, int64_t columns) : cache_(cache), begin_(begin), columns_(columns) {
  State& state = *cache.state_;
  invariant(0 <= place && place < state.places, "KvCache: no place ", place, " of ", state.places);
  require(columns > 0 && begin >= 0 && begin + columns <= state.capacity, "KvCache: ", columns, " more tokens after ", begin, " do not fit its capacity of ",
          state.capacity);
  state.place = place;
  state.begin = begin;
}

KvCache::Reading::~Reading() { cache_.state_->place = -1; }

at::Tensor KvCache::Reading::positions(at::Device device) const { return nn::consecutive(begin_, columns_, device); }

}  // namespace tessera
