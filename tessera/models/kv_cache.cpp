#include "tessera/models/kv_cache.h"

#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/sample_scope.h"

// The attention core takes keys and values longer than its queries as a context that ends with them, so a cache is an interceptor in front of it and no model
// needs to know. Memory is made at the first step, when it is known how many heads are here and of which dtype.

namespace tessera {

/// Around one attention core: adds the new keys and values to the earlier ones and attends to all.
class KvCache::Layer : public nn::Interceptor {
 public:
  explicit Layer(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    if (!state_->stepping) return next(std::move(inputs));
    inputs[1] = extend(keys_, inputs[1].toTensor());
    inputs[2] = extend(values_, inputs[2].toTensor());
    inputs[3] = c10::IValue();  // positions: the columns are all there, in order
    return next(std::move(inputs));
  }

 private:
  at::Tensor extend(at::Tensor& kept, const at::Tensor& added) {
    if (!kept.defined()) kept = at::empty({state_->batch, state_->capacity, added.size(2), added.size(3)}, added.options());
    kept.narrow(1, state_->length, added.size(1)).copy_(added);
    return kept.narrow(1, 0, state_->length + added.size(1));
  }

  std::shared_ptr<const State> state_;
  at::Tensor keys_, values_;  ///< [batch, capacity, K, D / H]
};

KvCache::KvCache(LanguageModel& model, int64_t batch, int64_t capacity) : model_(model), state_(std::make_shared<State>()) {
  state_->batch = batch;
  state_->capacity = capacity > 0 ? capacity : model.max_seq_len();
  require(state_->capacity <= model.max_seq_len(), "KvCache: a capacity of ", capacity, " tokens is more than model.max_seq_len = ", model.max_seq_len());
  if (!model.attention_pattern().empty()) {
    attached_ = nn::attach(model, model.attention_pattern(), [&](nn::Module&) { return std::make_shared<Layer>(state_); });
  }
}

KvCache::~KvCache() = default;

at::Tensor KvCache::step(const at::Tensor& tokens) {
  const int64_t batch = tokens.size(0), columns = tokens.size(1);
  require(batch == state_->batch && columns > 0, "KvCache: tokens of shape ", tokens.sizes(), " are not [", state_->batch, ", S] with S > 0");
  require(state_->length + columns <= state_->capacity, "KvCache: ", columns, " more tokens after ", state_->length, " are more than its capacity of ",
          state_->capacity);
  const at::NoGradGuard no_grad;
  struct Stepping {  // also switched off when a step throws
    State& state;
    explicit Stepping(State& state) : state(state) { state.stepping = true; }
    ~Stepping() { state.stepping = false; }
  } stepping(*state_);
  const at::Tensor positions = nn::consecutive(state_->length, columns, tokens.device());
  const at::Tensor hidden = model_.hidden(tokens, {.positions = positions, .document_ids = std::nullopt});
  // Where ranks hold parts of the sequence, the head puts it together, and no rank of several holds all of more than one column.
  const bool whole = hidden.size(1) == columns;
  const at::Tensor logits = model_.head()->logits(whole ? hidden.narrow(1, columns - 1, 1) : hidden);
  state_->length += columns;
  return logits.select(1, logits.size(1) - 1);
}

}  // namespace tessera
