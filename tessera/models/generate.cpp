#include "tessera/models/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/ops/tensor.h>

#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/models/kv_cache.h"

// The draw is made here from a counter generator and fp64 weights, not by torch::multinomial: the same on every rank and device, for a seed and a position,
// without any state. A context that is full does not move on by one token: each move would mean to read all of it again, since what is kept of every token was
// computed with those before it. The newer half is read again instead, once in capacity / 2 tokens: one more token read for each that is made.

namespace tessera {

int64_t sample_token(const at::Tensor& logits, const SampleOptions& options, uint64_t index) {
  require(options.temperature >= 0, "temperature = ", options.temperature, " must not be negative");
  require(options.top_k >= 0, "top_k = ", options.top_k, " must not be negative; 0 takes all tokens");
  require(options.top_p > 0 && options.top_p <= 1, "top_p = ", options.top_p, " must be above 0 and at most 1");
  const at::Tensor on_host = logits.detach().to(at::TensorOptions(at::kCPU).dtype(at::kDouble)).contiguous();
  const double* logit = on_host.const_data_ptr<double>();
  std::vector<int64_t> ids(static_cast<size_t>(on_host.numel()));
  require(!ids.empty() && std::all_of(logit, logit + ids.size(), [](double x) { return std::isfinite(x); }),
          "the model's logits are not finite: its weights are damaged");
  std::iota(ids.begin(), ids.end(), int64_t{0});
  const auto likelier = [&](int64_t a, int64_t b) { return logit[a] != logit[b] ? logit[a] > logit[b] : a < b; };
  if (options.temperature == 0) return *std::min_element(ids.begin(), ids.end(), likelier);

  if (options.top_k > 0 && options.top_k < static_cast<int64_t>(ids.size())) {
    std::partial_sort(ids.begin(), ids.begin() + options.top_k, ids.end(), likelier);
    ids.resize(static_cast<size_t>(options.top_k));
  } else {
    std::sort(ids.begin(), ids.end(), likelier);
  }
  std::vector<double> weight(ids.size());
  double total = 0;
  for (size_t i = 0; i < ids.size(); ++i) total += weight[i] = std::exp((logit[ids[i]] - logit[ids[0]]) / options.temperature);
  if (options.top_p < 1) {
    double kept = 0;
    size_t count = 0;
    while (count < ids.size() && kept < options.top_p * total) kept += weight[count++];
    ids.resize(count);
    total = kept;
  }
  double rest = CounterRng(options.seed, "generate").uniform(index) * total;
  for (size_t i = 0; i < ids.size(); ++i) {
    rest -= weight[i];
    if (rest < 0) return ids[i];
  }
  return ids.back();
}

std::vector<int64_t> generate(LanguageModel& model, const std::vector<int64_t>& prompt, int64_t max_new_tokens, const SampleOptions& options,
                              std::optional<int64_t> end_of_text, const std::function<bool(int64_t)>& on_token) {
  require(!prompt.empty(), "the prompt is empty: a continuation needs at least one token to begin with");
  const bool was_training = model.is_training();
  model.eval();
  struct Restore {
    LanguageModel& model;
    bool training;
    ~Restore() { model.train(training); }
  } restore{model, was_training};

  KvCache cache(model, /*batch=*/1);
  std::vector<int64_t> seen = prompt, made;
  const auto last = [&](size_t count) { return std::vector<int64_t>(seen.end() - static_cast<int64_t>(std::min(count, seen.size())), seen.end()); };
  const size_t capacity = static_cast<size_t>(cache.capacity()), half = std::max<size_t>(capacity / 2, 1);
  std::vector<int64_t> next = seen.size() < capacity ? seen : last(half);
  while (static_cast<int64_t>(made.size()) < max_new_tokens) {
    if (static_cast<size_t>(cache.length()) + next.size() > capacity) {
      cache.clear();
      next = last(half);
    }
    const auto device = model.head()->weight.device();
    const at::Tensor logits = cache.step(at::tensor(next, at::kLong).unsqueeze(0).to(device));
    const int64_t token = sample_token(logits[0], options, made.size());
    made.push_back(token);
    seen.push_back(token);
    if (token == end_of_text || (on_token && !on_token(token))) break;
    next = {token};
  }
  return made;
}

}  // namespace tessera
