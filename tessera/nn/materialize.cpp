#include <unordered_set>

#include <ATen/ops/empty.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include "tessera/core/error.h"
#include "tessera/core/memory.h"
#include "tessera/core/rng.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/module.h"
#include "tessera/nn/parameter.h"

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
  const CounterRng rng(seed, slice.name);
  for (size_t i = 0; i < slice.boxes.size(); ++i) {
    const Box& box = slice.boxes[i];
    if (box.empty()) continue;
    at::Tensor view = local_view(local, slice, i);
    if (rule->kind != InitRule::Kind::Constant) {
      if (view.is_contiguous() && view.is_cpu() && view.scalar_type() == at::kFloat) {
        draw_box(*rule, rng, slice, box, view.mutable_data_ptr<float>());
      } else {
        const at::Tensor drawn = at::empty(view.sizes(), at::kFloat);
        draw_box(*rule, rng, slice, box, drawn.mutable_data_ptr<float>());
        view.copy_(drawn);
      }
    }
    if (rule->zero_row && *rule->zero_row >= box.offset[0] && *rule->zero_row < box.offset[0] + box.size[0]) {
      view.view(box.size).select(0, *rule->zero_row - box.offset[0]).zero_();
    }
  }
}

}  // namespace nn

namespace {

using PlainBuffers = bool (*)(torch::nn::Module&);

template <class Norm>
bool reset_norm(torch::nn::Module& module) {
  auto* norm = dynamic_cast<Norm*>(&module);
  if (norm) norm->reset_running_stats();
  return norm != nullptr;
}

/// Buffers of one module get memory and values. Those that have memory are left alone: their values are the user's.
void materialize_buffers(torch::nn::Module& module, const std::string& path, at::Device device) {
  bool any = false;
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    if (!buffer.value().defined() || !buffer.value().is_meta()) continue;
    nn::materialize_storage(buffer.value(), device);
    any = true;
  }
  if (!any) return;
  if (auto* ours = dynamic_cast<nn::Module*>(&module); ours && ours->reset_buffers()) return;
  using namespace torch::nn;
  for (PlainBuffers reset : {&reset_norm<BatchNorm1dImpl>, &reset_norm<BatchNorm2dImpl>, &reset_norm<BatchNorm3dImpl>, &reset_norm<InstanceNorm1dImpl>,
                             &reset_norm<InstanceNorm2dImpl>, &reset_norm<InstanceNorm3dImpl>}) {
    if (reset(module)) return;
  }
  require(false, "materialize: nobody knows the values of the buffers of '", path, "' (", module.name(),
          "), which was built on meta; override reset_buffers() of tessera::nn::Module, or build it outside on_meta");
}

/// Gives every parameter without a rule the one of its kind of module; names those for which there is none.
void complete_rules(torch::nn::Module& root) {
  std::string missing;
  for (const auto& module : root.named_modules()) {
    for (const auto& parameter : module.value()->named_parameters(/*recurse=*/false)) {
      if (!parameter.value().defined() || nn::init_of(parameter.value())) continue;
      if (const auto rule = nn::default_init(*module.value(), parameter.key())) {
        nn::set_init(parameter.value(), *rule);
      } else {
        missing += (missing.empty() ? "'" : ", '") + (module.key().empty() ? "" : module.key() + ".") + parameter.key() + "'";
      }
    }
  }
  require(missing.empty(), "materialize: nothing says how to initialize ", missing, "; give each a rule with tessera::nn::set_init");
}

}  // namespace

void materialize(torch::nn::Module& root, uint64_t seed, at::Device device) {
  nn::assign_paths(root);
  complete_rules(root);
  for (const auto& parameter : nn::unique_parameters(root)) {
    const at::Tensor& tensor = parameter.tensor;
    const bool fits = tensor.sizes() == at::IntArrayRef(nn::slice_of(tensor).local_shape());
    if (nn::keeps_memory(tensor)) {
      require(tensor.device() == device, "materialize: the memory of '", parameter.name, "' was put on ", tensor.device(),
              " when it was sharded, and cannot be given on ", device, "; name that device to fully_shard");
    } else if (tensor.is_meta() || tensor.device() != device || !fits) {
      nn::materialize_storage(tensor, device);
    }
    nn::draw(tensor, seed);
  }
  for (const auto& module : root.named_modules()) materialize_buffers(*module.value(), module.key(), device);
}

}  // namespace tessera
