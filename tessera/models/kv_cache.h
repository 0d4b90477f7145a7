#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/attachment.h"
#include "tessera/models/model.h"

namespace tessera {

/// Keys and values of the tokens a model has seen, so that each further token costs one column. It attaches to the model's attention cores from outside and
/// works for whatever heads a rank holds; calls of the model that do not go through `step` are not affected.
/// Memory: 2 * layers * batch * capacity * kv_heads * head_dim elements of the compute dtype, allocated at the first step.
class KvCache {
 public:
  /// `capacity` tokens per row (0: the model's max_seq_len). The model must outlive the cache.
  KvCache(LanguageModel& model, int64_t batch, int64_t capacity = 0);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  /// tokens [batch, S] that follow what was seen -> logits [batch, V] of the last one. Records no gradients. Throws ConfigError where they do not fit.
  at::Tensor step(const at::Tensor& tokens);

  /// Forgets everything; memory is kept.
  void clear() { state_->length = 0; }
  int64_t length() const { return state_->length; }
  int64_t capacity() const { return state_->capacity; }

 private:
  class Layer;
  struct State {
    int64_t batch = 0, capacity = 0, length = 0;
    bool stepping = false;
  };

  LanguageModel& model_;
  std::shared_ptr<State> state_;  ///< shared with the interceptors
  Attachment attached_;
};

}  // namespace tessera
