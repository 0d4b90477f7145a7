#include "tessera/nn/attach.h"

#include <algorithm>
#include <unordered_set>

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "tessera/config/config.h"
#include "tessera/config/patterns.h"
#include "tessera/core/error.h"
#include "tessera/nn/names.h"
#include "tessera/nn/parameter.h"

// A chain is never changed, but replaced by a changed copy: a call that is under way goes on with the links that it began with, and attaching or detaching from
// within a hook is safe.

namespace tessera::nn {

std::optional<OutputLayout> output_layout(const Module& module, const at::Tensor& output) {
  if (!module.intercepted()) return std::nullopt;
  const Chain& chain = *module.chain();
  for (auto it = chain.rbegin(); it != chain.rend(); ++it) {
    if (auto layout = (*it)->output_layout(module, output)) return layout;
  }
  return std::nullopt;
}

void announce_use(Module& module) {
  const std::shared_ptr<const Chain> chain = module.chain();
  if (!chain) return;
  for (const auto& interceptor : *chain) interceptor->before_use(module);
}

Attachment attach(Module& module, std::shared_ptr<Interceptor> interceptor) {
  invariant(interceptor != nullptr, "attach: no interceptor given for '", module.path(), "'");
  // The module may be gone by the time of the undo. One on the stack has no owner to ask: its chain holds a link that dies with it.
  const auto link = std::make_shared<std::shared_ptr<Interceptor>>(interceptor);
  auto chain = module.chain_ ? std::make_shared<Chain>(*module.chain_) : std::make_shared<Chain>();
  chain->emplace_back(link, interceptor.get());
  module.chain_ = std::move(chain);

  const std::weak_ptr<torch::nn::Module> owned = module.weak_from_this();
  const bool has_owner = !owned.expired();
  return Attachment([owned, has_owner, raw = &module, link = std::weak_ptr(link), key = interceptor.get()] {
    const auto kept = owned.lock();
    if (has_owner ? kept == nullptr : link.expired()) return;
    if (!raw->chain_) return;
    // One interceptor attached twice loses its outermost place first.
    Chain left = *raw->chain_;
    const auto found = std::find_if(left.rbegin(), left.rend(), [&](const auto& one) { return one.get() == key; });
    if (found == left.rend()) return;
    left.erase(std::next(found).base());
    raw->chain_ = left.empty() ? nullptr : std::make_shared<const Chain>(std::move(left));
  });
}

Attachment attach(torch::nn::Module& root, const std::string& pattern, std::shared_ptr<Interceptor> interceptor) {
  return attach(root, pattern, [&](Module&) { return interceptor; });
}

namespace {
bool is_list(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr || dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
}
}  // namespace

std::vector<std::pair<std::string, std::shared_ptr<Module>>> interceptable_modules(torch::nn::Module& root, const std::string& pattern) {
  std::vector<std::pair<std::string, std::shared_ptr<Module>>> called;
  for (const auto& [path, module] : modules_matching(root, pattern)) {
    // Lists hold modules and are never called themselves: a pattern as wide as "**" means what is in them.
    const auto ours = std::dynamic_pointer_cast<Module>(module);
    require(ours != nullptr || is_list(*module), "'", path, "' (", module->name(),
            ") cannot be intercepted: it is a plain torch::nn::Module; derive it from tessera::nn::Module and declare it with TESSERA_MODULE");
    if (ours) called.emplace_back(path, ours);
  }
  require(!called.empty(), "'", pattern, "' cannot be intercepted: it names a list of modules, which is never called itself; name what is in it, '", pattern,
          ".*'");
  return called;
}

Attachment attach(torch::nn::Module& root, const std::string& pattern, const InterceptorFactory& make) {
  Attachment attached;
  for (const auto& found : interceptable_modules(root, pattern)) attached.add(attach(*found.second, make(*found.second)));
  return attached;
}

namespace {

/// Shared modules and tied tensors have the name of their first use.
struct PathWalk {
  std::unordered_set<const void*> seen;

  void name(torch::nn::Module& module, const std::string& path) {
    if (!seen.insert(&module).second) return;
    if (auto* ours = dynamic_cast<Module*>(&module)) ours->set_path(whole_name(ours->path(), path));
    const auto below = [&](const std::string& name) { return path.empty() ? name : path + "." + name; };
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = parameter.value();
      if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      const std::string given = slice_of(tensor).name;
      const std::string whole = whole_name(given, below(parameter.key()));
      if (whole != given) set_name(tensor, whole);
    }
    for (const auto& child : module.named_children()) name(*child.value(), below(child.key()));
  }
};

}  // namespace

bool matches(std::string_view pattern, std::string_view path) { return path_matches(pattern, path); }

namespace {

using MatchedModules = std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>;

/// What lies below `module` and matches, going down no further than the parts of the pattern, none of which is "**", lead.
void match_below(const torch::nn::Module& module, const std::string& path, const std::vector<std::string_view>& pattern, size_t depth, MatchedModules& found) {
  for (const auto& child : module.named_children()) {
    if (!component_matches(pattern[depth], child.key())) continue;
    const std::string at = path.empty() ? child.key() : path + "." + child.key();
    if (depth + 1 == pattern.size()) {
      found.emplace_back(at, child.value());
    } else {
      match_below(*child.value(), at, pattern, depth + 1, found);
    }
  }
}

}  // namespace

std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> modules_matching(torch::nn::Module& root, const std::string& pattern) {
  if (pattern.empty()) return {{"", share(root)}};
  MatchedModules matched;
  const auto parts = components_of(pattern);
  if (std::ranges::find(parts, "**") == parts.end()) {
    match_below(root, "", parts, 0, matched);
  } else {
    for (const auto& module : root.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
      if (matches(pattern, module.key())) matched.emplace_back(module.key(), module.value());
    }
  }
  if (matched.empty()) {
    const auto paths = root.named_modules(/*name_prefix=*/"", /*include_self=*/false).keys();
    const std::string near = nearest(pattern, paths);
    require(false, "no module matches '", pattern, "'", near.empty() ? "" : "; the nearest path is '" + near + "'",
            paths.empty() ? "; it has no modules inside" : "");
  }
  return matched;
}

void assign_paths(torch::nn::Module& root, const std::string& prefix) { PathWalk().name(root, prefix); }

std::shared_ptr<torch::nn::Module> share(torch::nn::Module& module) {
  if (auto owner = module.weak_from_this().lock()) return owner;
  return {std::shared_ptr<void>(), &module};
}

void check_no_bypass(torch::nn::Module& root) {
  root.apply([](const std::string& within, torch::nn::Module& module) {
    if (dynamic_cast<torch::nn::SequentialImpl*>(&module) == nullptr) return;
    for (const auto& child : module.named_children()) {
      const std::string path = within.empty() ? child.key() : within + "." + child.key();
      require(dynamic_cast<Module*>(child.value().get()) == nullptr, "'", path, "' (", child.value()->name(),
              ") is inside a torch::nn::Sequential, which calls forward directly and passes by every interceptor; use tessera::nn::Sequential there");
    }
  });
}

}  // namespace tessera::nn
