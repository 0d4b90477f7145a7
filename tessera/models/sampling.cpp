#include "tessera/models/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/rng.h"

// The draw is made here from a counter generator and fp64 weights, not by torch::multinomial: the same on every rank and device, for a seed and a position,
// without any state.

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

}  // namespace tessera
