#include "tessera/pipeline/split/own_modules.h"

#include <utility>
#include <vector>

#include "tessera/nn/attach.h"

namespace tessera::tape {

namespace {

/// What a stage has of a module. The module's own forward runs on the stage, and may ask it for its mode, as may what it has without parameters (dropout).
/// Where nobody holds the other stages, their modules go along: every rank records the whole pass.
struct PartOfModule final : torch::nn::Module {
  PartOfModule(torch::nn::Module& of, Others others) : torch::nn::Module(of.name()), whole(nn::share(of)), others(std::move(others)) {}
  void train(bool on = true) override {
    const auto not_ours = others();
    std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> kept;
    for (const auto& module : whole->modules(/*include_self=*/false)) {
      if (not_ours.contains(module.get())) kept.emplace_back(module, module->is_training());
    }
    whole->train(on);
    for (const auto& [module, mode] : kept) module->train(mode);
    torch::nn::Module::train(on);
  }
  std::shared_ptr<torch::nn::Module> whole;
  Others others;
};

std::string below(const std::string& path, const std::string& key) { return path.empty() ? key : path + "." + key; }

class Owner {
 public:
  Owner(const std::set<std::string>& owned, const std::set<std::string>& called, const Others& others) : owned_(owned), called_(called), others_(others) {}

  std::shared_ptr<torch::nn::Module> part(torch::nn::Module& module, const std::string& path) const {
    bool all = true, any = false;
    const auto look = [&](const auto& items) {
      for (const auto& item : items) {
        if (!item.value().defined()) continue;
        (owned_.contains(below(path, item.key())) ? any : all) = owned_.contains(below(path, item.key()));
      }
    };
    look(module.named_parameters());
    look(module.named_buffers());
    if (all && (any || called_.contains(path))) return nn::share(module);
    auto part = std::make_shared<PartOfModule>(module, others_);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (owned_.contains(below(path, item.key()))) part->register_parameter(item.key(), item.value(), item.value().requires_grad());
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      if (owned_.contains(below(path, item.key()))) part->register_buffer(item.key(), item.value());
    }
    bool has_children = false;
    for (const auto& child : module.named_children()) {
      auto inner = this->part(*child.value(), below(path, child.key()));
      if (!inner) continue;
      part->register_module(child.key(), std::move(inner));
      has_children = true;
    }
    return any || has_children ? part : nullptr;
  }

 private:
  const std::set<std::string>&owned_, &called_;
  const Others& others_;
};

}  // namespace

std::shared_ptr<torch::nn::Module> own_modules(torch::nn::Module& root, const std::set<std::string>& owned, const std::set<std::string>& called,
                                               const Others& others) {
  auto part = Owner(owned, called, others).part(root, "");
  return part ? part : std::make_shared<PartOfModule>(root, others);
}

}  // namespace tessera::tape
