#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/models/model.h"

namespace tessera {

/// Keys and values of the tokens that a model has read, so that each further token costs one column; of several sequences apart, in places of their own. It
/// attaches to the model's attention cores from outside, and works for whatever links and heads of the model a rank holds.
/// Memory of a place: 2 * layers * rows * capacity * kv_heads * head_dim elements of the compute dtype, of the layers and heads that are here, allocated when
/// it is first read into. With model.sliding_window = W a place keeps 2 W columns at most, those that windows have passed no longer.
///
/// Where sequences are cut over ranks (context parallelism), each keeps the keys and values of the columns that it read, an n-th of the capacity and two more,
/// windows or not. A token that all of them read together asks each for its part of the attention, and the parts are merged by their log-sum-exp: two
/// all-reduces a layer, of the queries' heads and of these times D + 1, in fp32. One of them, in turn, keeps its key and value.
class KvCache {
 public:
  /// `capacity` tokens per row (0: the model's max_seq_len); `columns`: ranks that sequences are cut over. The model must outlive the cache. Throws ConfigError
  /// for more than max_seq_len.
  explicit KvCache(LanguageModel& model, int places = 1, int64_t capacity = 0, const comm::Group& columns = {});
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  /// While it lives, calls of the model and of parts of it read `columns` tokens that follow the first `begin` of what lies at a place, with positions(). What
  /// was there behind `begin` is forgotten. Calls outside of it pass the cache by. Throws ConfigError where they do not fit, and, when the model is called,
  /// where a `begin` goes back to what a window has passed.
  ///
  /// Ranks that sequences are cut over all read the same columns, or, from the beginning (`begin` 0), each its `Part` of them: then what is attached to the
  /// model's attention knows how they are cut, and positions() are the caller's to say; attention that is called without them is refused by name.
  enum class Read { Whole, Part };
  class Reading {
   public:
    Reading(KvCache& cache, int place, int64_t begin, int64_t columns, Read read = Read::Whole);
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

    at::Tensor positions(at::Device device) const;  ///< begin, begin + 1, ...: int64 [columns]

   private:
    KvCache& cache_;
    int64_t begin_, columns_;
  };

  int64_t capacity() const { return state_->capacity; }

 private:
  class Layer;
  struct State {
    int places = 1;
    int64_t capacity = 0;
    comm::Group columns;
    int place = -1;  ///< that is read into; -1: none
    int64_t begin = 0;
    Read read = Read::Whole;
    std::vector<int64_t> positions{};  ///< of the part that is read, once a layer has asked
  };

  std::shared_ptr<State> state_;  ///< shared with the interceptors
  Attachment attached_;
};

}  // namespace tessera
