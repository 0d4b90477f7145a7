#include <memory>
#include <optional>
#include <unordered_map>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/saved_tensors.h"
#include "tessera/recompute/budget.h"
#include "tessera/recompute/former_buffers.h"
#include "tessera/recompute/kept_values.h"

// Saved tensors are counted by storage, each for the first module that keeps it, since views of one memory are kept once; storages are held for so long, or a
// new one could come at an old one's address. FLOPs of what is no product are counted as one an element: such operators wait for memory and not for arithmetic,
// but a module made of them alone is not free.

namespace tessera {

namespace {

/// Held, so that no other storage can take the address of one that was counted.
using Storages = std::unordered_map<const c10::StorageImpl*, c10::Storage>;

/// Adds up what is saved, and takes none of it.
class SavedBytes final : public nn::SavedTensorHooks {
 public:
  SavedBytes(Storages& known, int64_t& bytes) : known_(known), bytes_(bytes) {}
  std::unique_ptr<nn::SavedTensor> pack(const at::Tensor& tensor) override {
    count(tensor);
    return nullptr;
  }
  void count(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return;
    const c10::Storage& storage = tensor.storage();
    if (known_.emplace(storage.unsafeGetStorageImpl(), storage).second) bytes_ += static_cast<int64_t>(storage.nbytes());
  }

 private:
  Storages& known_;
  int64_t& bytes_;
};

class ForwardFlops final : public nn::OperatorHooks {
 public:
  explicit ForwardFlops(double& flops) : flops_(flops) {}
  void call(nn::OperatorCall& operation) override {
    const double product = nn::product_flops(operation.name(), operation.arguments());
    operation.run(/*watch_inside=*/product == 0);
    flops_ += product;
    if (product > 0 || operation.schema().returns().empty()) return;
    const c10::IValue& result = operation.results()[0];
    const bool writes = !operation.schema().returns()[0].alias_info();
    if (writes && result.isTensor() && result.toTensor().defined()) flops_ += static_cast<double>(result.toTensor().numel());
  }

 private:
  double& flops_;
};

class Meter final : public nn::Interceptor {
 public:
  Meter(RecomputeCost& cost, Storages& known) : cost_(cost), known_(known) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    SavedBytes input_bytes(known_, cost_.input_bytes);
    for (const auto& input : inputs) {
      nn::map_tensors(input, [&](const at::Tensor& tensor) {
        input_bytes.count(tensor);
        return tensor;
      });
    }
    const nn::SavedTensorScope saved(std::make_shared<SavedBytes>(known_, cost_.inner_bytes));
    const nn::OperatorScope operators(std::make_shared<ForwardFlops>(cost_.flops));
    FormerBuffers buffers(module, cost_.path);
    std::optional<nn::OperatorScope> watched;
    if (buffers.has_any()) watched.emplace(buffers.recorder());
    nn::Values outputs = next(std::move(inputs));
    cost_.input_bytes += buffers.copied_bytes();
    return outputs;
  }

 private:
  RecomputeCost& cost_;
  Storages& known_;
};

void refuse_nested(const std::vector<RecomputeCost>& costs, const std::string& pattern) {
  for (const auto& outer : costs) {
    for (const auto& inner : costs) {
      require(!inner.path.starts_with(outer.path + "."), "recompute.modules = ", pattern, ": '", inner.path, "' lies inside '", outer.path,
              "'; with a budget each tensor belongs to one module: choose a pattern that matches one level");
    }
  }
}

}  // namespace

std::vector<RecomputeCost> measure_recompute(torch::nn::Module& root, const std::string& pattern, const std::function<void()>& forward) {
  Storages known;
  for (const auto& parameter : root.parameters()) known.emplace(parameter.storage().unsafeGetStorageImpl(), parameter.storage());
  std::vector<RecomputeCost> costs;
  for (const auto& found : nn::interceptable_modules(root, pattern)) costs.push_back({.path = found.first});
  refuse_nested(costs, pattern);
  size_t next = 0;
  const auto metered = nn::attach(root, pattern, [&](nn::Module&) { return std::make_shared<Meter>(costs.at(next++), known); });
  const at::AutoGradMode recorded(true);
  forward();
  return costs;
}

}  // namespace tessera
