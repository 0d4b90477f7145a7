#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/init_tape.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/module.h"
#include "tessera/nn/names.h"
#include "tessera/nn/parameter.h"

// An element depends on seed, name and index alone, so each rank draws the boxes it holds, and nothing has to be sent for replicas and layouts to agree. Who
// says what the values are: the tape or set_init(), whichever spoke last; where neither did, libtorch's rule for the module. A tensor drawn by a rule gets
// other numbers than its constructor drew: whatever else was computed from those would no longer fit it, and is refused; only a plain copy is drawn as its
// original.

namespace tessera {

namespace nn {

namespace {

/// Elements of `box` of the logical tensor, in row-major order, into `out`.
void draw_box(const InitRule& rule, const CounterRng& rng, const Slice& slice, const Box& box, float* out) {
  for_each_run(slice.shape, box, [&](int64_t first, int64_t count) {
    if (rule.kind == InitRule::Kind::Normal) {
      rng.fill_normal(out, first, count, static_cast<float>(rule.a), static_cast<float>(rule.b));
    } else {
      rng.fill_uniform(out, first, count, static_cast<float>(rule.a), static_cast<float>(rule.b));
    }
    out += count;
  });
}

/// Of the real and of the imaginary part of complex numbers, as libtorch's normal_ (whose deviation is that of the distance) and uniform_ draw them.
InitRule of_each_part(InitRule rule) {
  if (rule.kind == InitRule::Kind::Normal) rule.b /= std::sqrt(2.0);
  return rule;
}

/// The part of the local tensor that holds box number `index`, in the box's shape or (flattened slices) as one run.
at::Tensor local_view(const at::Tensor& local, const Slice& slice, size_t index) {
  const Box place = slice.local_box(index);
  at::Tensor view = local;
  for (size_t dim = 0; dim < place.size.size(); ++dim) view = view.narrow(static_cast<int64_t>(dim), place.offset[dim], place.size[dim]);
  return view;
}

}  // namespace

void draw(const at::Tensor& parameter, uint64_t seed) {
  const auto rule = init_of(parameter);
  invariant(rule.has_value(), "draw: '", slice_of(parameter).name, "' has no rule");
  if (parameter.is_meta()) return;
  at::NoGradGuard no_grad;
  const at::Tensor local = parameter.detach();
  if (rule->kind == InitRule::Kind::Constant) {
    local.fill_(rule->a);
  }
  const Slice& slice = slice_of(parameter);
  const CounterRng rng(seed, slice_of(drawn_as(parameter)).name);
  for (size_t i = 0; i < slice.boxes.size(); ++i) {
    const Box& box = slice.boxes[i];
    if (box.empty()) continue;
    at::Tensor view = local_view(local, slice, i);
    if (rule->kind == InitRule::Kind::Constant) {
      // filled above
    } else if (view.is_contiguous() && view.is_cpu() && view.scalar_type() == at::kFloat) {
      draw_box(*rule, rng, slice, box, view.mutable_data_ptr<float>());
    } else {
      const auto drawn_by = [&](const InitRule& of_part, const CounterRng& part) {
        const at::Tensor drawn = at::empty(view.sizes(), at::device(at::kCPU).dtype(at::kFloat));
        draw_box(of_part, part, slice, box, drawn.mutable_data_ptr<float>());
        return drawn;
      };
      if (view.is_complex() && !rule->is_real) {
        const InitRule part = of_each_part(*rule);
        view.copy_(at::complex(drawn_by(part, rng), drawn_by(part, CounterRng(seed, slice_of(drawn_as(parameter)).name + "#imaginary"))));
      } else {
        view.copy_(drawn_by(*rule, rng));
      }
    }
    if (rule->zero_row && *rule->zero_row >= box.offset[0] && *rule->zero_row < box.offset[0] + box.size[0]) {
      view.view(box.size).select(0, *rule->zero_row - box.offset[0]).zero_();
    }
  }
}

namespace {

using PlainBuffers = bool (*)(torch::nn::Module&);

template <class Norm>
bool reset_norm(torch::nn::Module& module) {
  auto* norm = dynamic_cast<Norm*>(&module);
  if (norm) norm->reset_running_stats();
  return norm != nullptr;
}

std::string below(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

/// The same numbers, computed in another way.
bool nearly_equal(const InitRule& a, const InitRule& b) {
  const auto near = [](double x, double y) { return std::abs(x - y) <= 1e-9 * std::max(std::abs(x), std::abs(y)); };
  return a.kind == b.kind && a.zero_row == b.zero_row && near(a.a, b.a) && (a.kind == InitRule::Kind::Constant || near(a.b, b.b));
}

/// What computes tensors that no rule describes: their recipes, of one model. Random numbers that several tensors are computed from belong to the first of
/// them, so all see the same.
class Recipes {
 public:
  explicit Recipes(uint64_t seed) : seed_(seed) {}

  void add(const at::Tensor& tensor, const std::string& name, InitTape::Recipe recipe) {
    for (const size_t op : recipe.random) owners_.emplace(std::pair(origin_of(tensor)->tape.get(), op), name);
    recipes_.emplace(tensor.unsafeGetTensorImpl(), std::move(recipe));
  }

  bool contains(const at::Tensor& tensor) const { return recipes_.contains(tensor.unsafeGetTensorImpl()); }

  /// Where `recipe` is one rule of numbers that a parameter draws by its own: that parameter. Throws where the rules differ.
  std::optional<at::Tensor> parameter_of(const at::Tensor& tensor, const std::string& name, const InitTape::Recipe& recipe) const {
    if (!recipe.rule || !recipe.draw) return std::nullopt;
    const auto found = draws_.find({origin_of(tensor)->tape.get(), *recipe.draw});
    if (found == draws_.end()) return std::nullopt;
    require(nearly_equal(*recipe.rule, found->second.rule), refusal(name, found->second.name));
    return found->second.tensor;
  }

  /// A tensor that is drawn by a rule gets other numbers than the constructor's; what is computed from those would not fit it. A plain copy gets the same.
  void drawn_by_rule(const at::Tensor& tensor, const std::string& name, const InitTape::Recipe& recipe) {
    const auto* const tape = origin_of(tensor)->tape.get();
    for (const size_t op : recipe.random) drawn_.emplace(std::pair(tape, op), name);
    if (!recipe.draw) return;
    const auto [first, is_new] = draws_.try_emplace({tape, *recipe.draw}, Drawn{tensor, name, *recipe.rule});
    if (is_new) return;
    require(nearly_equal(*recipe.rule, first->second.rule), refusal(name, first->second.name));
    set_drawn_as(tensor, drawn_as(first->second.tensor));  // which may be a copy itself
  }

  void check() const {
    for (const auto& [op, name] : owners_) {
      const auto drawn = drawn_.find(op);
      require(drawn == drawn_.end(), refusal(name, drawn == drawn_.end() ? "" : drawn->second));
    }
  }

  at::Tensor compute(const at::Tensor& tensor, const std::string& name) const {
    const auto origin = origin_of(tensor);
    return origin->tape->run(origin->view, recipes_.at(tensor.unsafeGetTensorImpl()), name, [&](size_t op) {
      const auto owner = owners_.find({origin->tape.get(), op});
      return CounterRng(seed_, (owner == owners_.end() ? name : owner->second) + "#" + std::to_string(op)).key();
    });
  }

 private:
  using Drawing = std::pair<const InitTape*, size_t>;
  struct Drawn {
    at::Tensor tensor;
    std::string name;
    InitRule rule;
  };

  static std::string refusal(const std::string& name, const std::string& of) {
    return tessera::detail::concat(
        "materialize: '", name, "' is computed from the random numbers of '", of,
        "', which every rank draws anew for its own part; give both a rule with tessera::nn::set_init, or compute the one from the other "
        "after materialize");
  }

  uint64_t seed_;
  std::unordered_map<const c10::TensorImpl*, InitTape::Recipe> recipes_;
  std::map<Drawing, std::string> owners_, drawn_;
  std::map<Drawing, Drawn> draws_;
};

void refuse_late_write(const std::string& name, const at::Tensor& tensor) {
  require(!written_since(tensor), "materialize: '", name,
          "' was written after on_meta had returned, when it had no memory to keep the values in; write it in the init of on_meta (on_meta(build, init)), or "
          "after materialize, or give it a rule with tessera::nn::set_init");
}

/// A forward pass on meta moves them, and leaves them what they are at the start.
bool is_running_statistic(const std::string& key) { return key == "running_mean" || key == "running_var" || key == "num_batches_tracked"; }

/// Buffers of one module get memory and values. Those that have memory are left alone: their values are the user's.
/// `recipes`: of the model's parameters, of whose numbers some may be made.
void materialize_buffers_of(torch::nn::Module& module, const std::string& path, uint64_t seed, at::Device device, Recipes& recipes) {
  std::vector<std::pair<std::string, at::Tensor>> made;
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    if (!buffer.value().defined() || !buffer.value().is_meta()) continue;
    if (!is_running_statistic(buffer.key()) && dynamic_cast<Module*>(&module) == nullptr) refuse_late_write(below(path, buffer.key()), buffer.value());
    forget_version(buffer.value());
    materialize_storage(buffer.value(), device);
    made.emplace_back(below(path, buffer.key()), buffer.value());
  }
  if (made.empty()) return;
  if (auto* ours = dynamic_cast<Module*>(&module); ours && ours->reset_buffers()) return;
  std::erase_if(made, [&](const auto& buffer) {
    const auto& [name, tensor] = buffer;
    const auto origin = origin_of(tensor);
    if (!origin || origin->view.sizes != tensor.sizes()) return false;
    auto recipe = origin->tape->recipe_for(origin->view);
    if (!recipe.written) return false;
    if (tensor.is_meta()) return true;
    const at::NoGradGuard no_grad;
    if (const auto parameter = recipes.parameter_of(tensor, name, recipe)) {
      const at::Tensor whole = at::empty_like(tensor);
      set_slice(whole, Slice::whole(name, tensor.sizes().vec()));
      set_init(whole, *recipe.rule);
      set_drawn_as(whole, drawn_as(*parameter));
      draw(whole, seed);
      tensor.copy_(whole);
      return true;
    }
    recipes.add(tensor, name, std::move(recipe));
    recipes.check();
    tensor.copy_(recipes.compute(tensor, name));
    return true;
  });
  if (made.empty()) return;
  using namespace torch::nn;
  for (PlainBuffers reset : {&reset_norm<BatchNorm1dImpl>, &reset_norm<BatchNorm2dImpl>, &reset_norm<BatchNorm3dImpl>, &reset_norm<InstanceNorm1dImpl>,
                             &reset_norm<InstanceNorm2dImpl>, &reset_norm<InstanceNorm3dImpl>}) {
    if (reset(module)) return;
  }
  require(false, "materialize: nobody knows the values of the buffer '", made.front().first, "' of '", path, "' (", module.name(),
          "), which was built on meta and never filled there; fill it in the constructor or in the init of on_meta, override reset_buffers() of "
          "tessera::nn::Module, or build the module outside of on_meta");
}

/// Finds for every parameter what gives it values; names those for which nothing does.
Recipes find_values(torch::nn::Module& root, uint64_t seed) {
  Recipes recipes(seed);
  std::set<const c10::TensorImpl*> seen;
  std::string missing;
  using Memory = std::pair<const InitTape*, int>;
  std::map<Memory, at::Tensor> ruled;  // what set_init() gives values to where the tape does not
  struct Copy {
    at::Tensor tensor;
    Memory of;
    std::string path;
  };
  std::vector<Copy> copies;  // of such memory
  root.apply([&](const std::string& path, torch::nn::Module& module) {
    // Attention sets the bias of the linear layer that it owns.
    if (auto* attention = dynamic_cast<torch::nn::MultiheadAttentionImpl*>(&module)) {
      const at::Tensor& bias = attention->out_proj->bias;
      if (bias.defined() && !init_of(bias) && !origin_of(bias)) set_init(bias, InitRule::zeros());
    }
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = parameter.value();
      if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      const std::string name = slice_of(tensor).name;  // which set_init moves
      const auto given = init_of(tensor);
      if (!given || init_position(tensor) != std::numeric_limits<size_t>::max()) refuse_late_write(below(path, parameter.key()), tensor);
      const auto usual = default_init(module, parameter.key());
      if (const auto origin = origin_of(tensor); origin && origin->view.sizes == slice_of(tensor).shape) {
        auto recipe = origin->tape->recipe_for(origin->view);
        if (recipe.written && (!given || recipe.last > init_position(tensor))) {
          if (!recipe.rule) {
            recipes.add(tensor, name, std::move(recipe));
            continue;
          }
          if (!given || !nearly_equal(*given, *recipe.rule)) set_init(tensor, usual && nearly_equal(*usual, *recipe.rule) ? *usual : *recipe.rule);
          recipes.drawn_by_rule(tensor, name, recipe);
          continue;
        }
        if (given && origin->view.covers) ruled.emplace(Memory{origin->tape.get(), origin->view.memory}, tensor);
        const bool is_copy = recipe.blank && (!given || recipe.last > init_position(tensor));
        if (is_copy) copies.push_back({tensor, {origin->tape.get(), *recipe.blank}, below(path, parameter.key())});
        if (given || is_copy) continue;
        missing += (missing.empty() ? "'" : ", '") + below(path, parameter.key()) + "'";
        continue;
      }
      if (given) continue;
      if (usual) {
        set_init(tensor, *usual);
      } else {
        missing += (missing.empty() ? "'" : ", '") + below(path, parameter.key()) + "'";
      }
    }
  });
  for (const auto& [tensor, memory, path] : copies) {
    if (const auto found = ruled.find(memory); found != ruled.end()) {
      set_init(tensor, *init_of(found->second));
      set_drawn_as(tensor, drawn_as(found->second));
    } else if (!init_of(tensor)) {
      missing += (missing.empty() ? "'" : ", '") + path + "'";
    }
  }
  require(missing.empty(), "materialize: nothing says how to initialize ", missing,
          "; fill it in its constructor or in the init of on_meta (where it was cast or moved since then, do that in the function that on_meta is given), or "
          "give it a rule with tessera::nn::set_init");
  recipes.check();
  return recipes;
}

void materialize_buffers_by(Recipes& recipes, torch::nn::Module& root, uint64_t seed, at::Device device) {
  root.apply([&](const std::string& path, torch::nn::Module& module) { materialize_buffers_of(module, path, seed, device, recipes); });
}

}  // namespace

void materialize_buffers(torch::nn::Module& root, uint64_t seed, at::Device device) {
  Recipes recipes(seed);
  materialize_buffers_by(recipes, root, seed, device);
}

}  // namespace nn

void materialize(torch::nn::Module& root, uint64_t seed, at::Device device) {
  nn::assign_paths(root);
  nn::refuse_shared_names(root);
  auto recipes = nn::find_values(root, seed);
  auto parameters = nn::unique_parameters(root);
  for (auto& parameter : nn::following_parameters(root)) parameters.push_back(std::move(parameter));  // drawn alike, by their name
  for (const auto& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    nn::forget_version(tensor);
    const bool fits = tensor.sizes() == at::IntArrayRef(nn::slice_of(tensor).local_shape());
    if (nn::keeps_memory(tensor)) {
      const bool beside = tensor.is_cpu() && nn::is_kept_beside(tensor);
      require(tensor.device() == device || beside, "materialize: the memory of '", parameter.name, "' was put on ", tensor.device(),
              " when it was sharded, and cannot be given on ", device, "; name that device to fully_shard");
    } else if (tensor.is_meta() || tensor.device() != device || !fits) {
      nn::materialize_storage(tensor, device);
    }
    if (!recipes.contains(tensor)) {
      nn::draw(tensor, seed);
    } else if (!tensor.is_meta()) {
      const at::NoGradGuard no_grad;
      tensor.detach().copy_(take(recipes.compute(tensor, parameter.name), nn::slice_of(tensor)));
    }
  }
  nn::materialize_buffers_by(recipes, root, seed, device);
}

}  // namespace tessera
