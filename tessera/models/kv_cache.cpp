#include "tessera/models/kv_cache.h"

#include <algorithm>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/nn/tiled_attention.h"

// The attention core takes keys and values longer than its queries as a context that ends with them, so a cache is an interceptor in front of it and no model
// needs to know. Memory is made when it is first known how many rows and heads are here, and of which dtype.
//
// Over several ranks a text's keys lie where they were computed, and stay there: a new query is small and goes to the keys, all of which no rank could hold.
// Each rank attends to those that it has; exp(lse) says how much a rank's part weighs beside the others', and the largest lse is taken out first, so that no
// weight overflows. A rank that has none yet gives zeros of weight zero.

namespace tessera {
namespace {

/// Attention to some of the keys: softmax(scale q k^T) v.
struct Partial {
  at::Tensor out;  ///< fp32 [B, S, H, D]
  at::Tensor lse;  ///< fp32 [B, S, H, 1]: log of the sum of exponentials of the scores
};

/// Of each query, the keys that it sees.
Partial attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<ColumnRun>& seen) {
  std::vector<nn::AttentionTile> tiles;
  for (size_t query = 0; query < seen.size(); ++query) {
    if (seen[query].size == 0) continue;
    const bool alike = query > 0 && seen[query] == seen[query - 1];
    if (alike) {
      ++tiles.back().queries.size;
    } else {
      tiles.push_back({.queries = {static_cast<int64_t>(query), 1}, .keys = seen[query]});
    }
  }
  nn::TiledAttention attention(q);
  attention.add(k, v, tiles);
  const auto [out, lse] = attention.finish();
  return {.out = out.to(at::kFloat), .lse = lse.transpose(1, 2).unsqueeze(-1)};
}

/// What attention to the keys of all ranks gives; every rank has the same queries.
at::Tensor merge(const comm::Group& group, const Partial& own) {
  const comm::CallSite site("context_parallel.cache");
  const at::Tensor most = own.lse.contiguous().clone();
  comm::all_reduce(group, most, comm::Op::Max);
  const at::Tensor weight = at::exp(own.lse - most), sum = at::cat({own.out * weight, weight}, -1).contiguous();
  comm::all_reduce(group, sum);
  const int64_t features = own.out.size(-1);
  return sum.narrow(-1, 0, features) / sum.narrow(-1, features, 1);
}

}  // namespace

/// Around one attention core: adds the new keys and values to the earlier ones and attends to all.
class KvCache::Layer : public nn::Interceptor {
 public:
  explicit Layer(std::shared_ptr<State> state) : state_(std::move(state)), kept_(static_cast<size_t>(state_->places)) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    if (state_->place < 0) return next(std::move(inputs));
    Kept& kept = kept_.at(static_cast<size_t>(state_->place));
    const int64_t window = dynamic_cast<const nn::AttentionCoreImpl&>(module).reach().window;
    forget(kept, window);
    const at::Tensor q = inputs[0].toTensor(), k = inputs[1].toTensor(), v = inputs[2].toTensor();
    if (state_->columns.size() > 1 && state_->read == Read::Whole) return {attend_together(kept, q, k, v, window)};
    if (state_->read == Read::Part) {
      extend(kept, k, v, 0);
      require(inputs.size() > 3 && inputs[3].isTensor(), "KvCache: attention '", module.path(),
              "' is called without positions, and a rank that reads a part of ",
              "a sequence does not know by itself which columns it has; hand the positions that the model is given on to it");
      kept.positions = positions_of_part(inputs[3].toTensor());
      return next(std::move(inputs));  // which reaches the other parts
    }
    const auto [keys, values] = extend(kept, k, v, window);
    inputs[1] = keys;
    inputs[2] = values;
    if (inputs.size() > 3) inputs[3] = c10::IValue();  // positions: the columns are all there, in order
    return next(std::move(inputs));
  }

 private:
  struct Kept {
    at::Tensor keys, values;         ///< [rows, room, K, D]
    int64_t columns = 0;             ///< that are there
    int64_t gone = 0;                ///< on one rank: those before them, which no window reaches
    std::vector<int64_t> positions;  ///< over several ranks: theirs, ascending
  };

  /// Every layer is given the same: the host looks once a reading.
  const std::vector<int64_t>& positions_of_part(const at::Tensor& given) const {
    if (state_->positions.empty()) {
      const auto read = host_read_all(given, /*dry_answer=*/0);
      state_->positions.assign(read.begin(), read.end());
    }
    return state_->positions;
  }

  /// What lies behind the beginning of what is read now.
  void forget(Kept& kept, int64_t window) const {
    const int64_t begin = state_->begin;
    if (begin == 0) {
      kept.columns = kept.gone = 0;
      kept.positions.clear();
    } else if (state_->columns.size() == 1) {
      require(kept.gone == 0 || begin - kept.gone >= window - 1, "KvCache: what follows ", begin, " tokens sees the ", window - 1, " before it, and the first ",
              kept.gone, " are let go of, for model.sliding_window = ", window, " had passed them; read again from the beginning");
      require(begin - kept.gone <= kept.columns, "KvCache: ", begin, " tokens are to be before what is read, and ", kept.gone + kept.columns,
              " have been read; read those between as well");
      kept.columns = begin - kept.gone;
    } else {
      kept.columns = std::ranges::lower_bound(kept.positions, begin) - kept.positions.begin();
      kept.positions.resize(static_cast<size_t>(kept.columns));
    }
  }

  int64_t room(int64_t window) const {
    const int64_t ranks = state_->columns.size();
    if (ranks > 1) return (state_->capacity + ranks - 1) / ranks + 2;
    return window > 0 ? std::min(state_->capacity, 2 * window) : state_->capacity;
  }

  /// Over several ranks room is for even shares; who goes back within what was cut otherwise may leave one rank more.
  void grow(Kept& kept, int64_t added) const {
    if (state_->columns.size() == 1 || !kept.keys.defined() || kept.columns + added <= kept.keys.size(1)) return;
    for (auto* const all : {&kept.keys, &kept.values}) {
      std::vector<int64_t> sizes = all->sizes().vec();
      sizes[1] = 2 * (kept.columns + added);
      const at::Tensor larger = at::empty(sizes, all->options());
      larger.narrow(1, 0, kept.columns).copy_(all->narrow(1, 0, kept.columns));
      *all = larger;
    }
  }

  /// With the new ones, all that are there, or, with a `window`, all that these see.
  std::pair<at::Tensor, at::Tensor> extend(Kept& kept, const at::Tensor& k, const at::Tensor& v, int64_t window) {
    const int64_t added = k.size(1);
    grow(kept, added);
    const int64_t most = state_->columns.size() > 1 && kept.keys.defined() ? kept.keys.size(1) : room(window);
    for (auto* const all : {&kept.keys, &kept.values}) {
      const bool other_rows = all->defined() && kept.columns == 0 && all->size(0) != k.size(0);
      if (!all->defined() || other_rows) *all = at::empty({k.size(0), most, k.size(2), k.size(3)}, k.options());
    }
    // Room is for two windows: what stays moves once in the tokens of one.
    const bool moves = kept.columns + added > most;
    const int64_t before = moves ? std::min(kept.columns, window - 1) : kept.columns, from = kept.columns - before;
    if (before + added > most) {  // more than stay: seen from where they are
      const int64_t stay = std::min(before + added, window - 1);
      const auto extended = [&](const at::Tensor& all, const at::Tensor& some) {
        at::Tensor both = at::cat({all.narrow(1, from, before), some}, 1);
        all.narrow(1, 0, stay).copy_(both.narrow(1, before + added - stay, stay));
        return both;
      };
      std::pair seen{extended(kept.keys, k), extended(kept.values, v)};
      kept.gone += kept.columns + added - stay;
      kept.columns = stay;
      return seen;
    }
    const auto extended = [&](const at::Tensor& all, const at::Tensor& some) {
      if (from > 0) all.narrow(1, 0, before).copy_(all.narrow(1, from, before).clone());
      all.narrow(1, before, added).copy_(some);
      return all.narrow(1, 0, before + added);
    };
    kept.gone += from;
    kept.columns = before + added;
    return {extended(kept.keys, k), extended(kept.values, v)};
  }

  /// All ranks have these few columns, and each its part of those before them. Each of them is kept by the next rank in turn.
  at::Tensor attend_together(Kept& kept, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window) {
    const int64_t ranks = state_->columns.size(), columns = q.size(1), place = (state_->columns.rank() + ranks - state_->begin % ranks) % ranks;
    invariant(columns <= ranks, "KvCache: ", columns, " columns for ", ranks, " ranks, which would read a part of them each");
    const bool keeps = place < columns;
    const auto own = [&](const at::Tensor& x) { return keeps ? x.narrow(1, place, 1) : x.narrow(1, 0, 0); };
    const auto [keys, values] = extend(kept, own(k), own(v), 0);
    if (keeps) kept.positions.push_back(state_->begin + place);
    std::vector<ColumnRun> seen;
    for (int64_t query = 0; query < columns; ++query) {
      const int64_t end = kept.columns - (keeps && query < place ? 1 : 0);  // the newest is behind those before it
      const auto passed = std::ranges::upper_bound(kept.positions, state_->begin + query - window) - kept.positions.begin();
      const int64_t first = window > 0 ? std::min<int64_t>(passed, end) : 0;
      seen.push_back({first, end - first});
    }
    return merge(state_->columns, attend(q, keys, values, seen)).to(q.scalar_type());
  }

  std::shared_ptr<State> state_;
  std::vector<Kept> kept_;  ///< of each place
};

KvCache::KvCache(LanguageModel& model, int places, int64_t capacity, const comm::Group& columns) : state_(std::make_shared<State>()) {
  state_->places = places;
  state_->columns = columns;
  state_->capacity = capacity > 0 ? capacity : model.max_seq_len();
  require(state_->capacity <= model.max_seq_len(), "KvCache: a capacity of ", capacity, " tokens is more than model.max_seq_len = ", model.max_seq_len());
  const std::string pattern = model.attention_pattern();
  const auto modules = model.named_modules("", /*include_self=*/false);  // a stage without blocks has no attention
  const bool attends = std::ranges::any_of(modules, [&](const auto& module) { return nn::matches(pattern, module.key()); });
  if (!pattern.empty() && attends) attached_ = nn::attach(model, pattern, [&](nn::Module&) { return std::make_shared<Layer>(state_); });
}

KvCache::~KvCache() = default;

KvCache::Reading::Reading(KvCache& cache, int place, int64_t begin, int64_t columns, Read read) : cache_(cache), begin_(begin), columns_(columns) {
  State& state = *cache.state_;
  invariant(0 <= place && place < state.places, "KvCache: no place ", place, " of ", state.places);
  require(columns > 0 && begin >= 0 && begin + columns <= state.capacity, "KvCache: ", columns, " more tokens after ", begin, " do not fit its capacity of ",
          state.capacity);
  require(read == Read::Whole || begin == 0, "KvCache: a part of what follows ", begin, " tokens would not see those of the other ranks");
  state.place = place;
  state.begin = begin;
  state.read = read;
  state.positions.clear();
}

KvCache::Reading::~Reading() { cache_.state_->place = -1; }

at::Tensor KvCache::Reading::positions(at::Device device) const { return kernels::consecutive(begin_, columns_, device); }

}  // namespace tessera
