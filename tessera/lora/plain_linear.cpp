#include "tessera/lora/plain_linear.h"

#include <optional>
#include <utility>

#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include "tessera/core/error.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/saved_tensors.h"

// torch::nn::Linear writes x.matmul(weight.t()) or addmm(bias, x, weight.t()): the weight is known by its memory and by how the view of it runs. Nodes of
// libtorch's own multiply by it, too: the other way round, but again like this behind a product by the weight as it is (a tied decoder), or in a derivative of
// a gradient. What the term gives there is autograd's own, and by `current node` the two are told apart.

namespace tessera::lora {
namespace {

/// Where an operator has x, the weight [O, I], or its transpose, and a factor of their product among its arguments.
struct ProductArguments {
  size_t count = 0, x = 0, weight = 0;
  bool transposed = false;
  std::optional<size_t> factor = std::nullopt;
};

std::optional<ProductArguments> product_arguments(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name == "aten::linear") return ProductArguments{.count = 3, .x = 0, .weight = 1};
  if (name == "aten::matmul" || name == "aten::mm") return ProductArguments{.count = 2, .x = 0, .weight = 1, .transposed = true};
  if (name == "aten::addmm" && op.schema().overload_name().empty()) return ProductArguments{.count = 5, .x = 1, .weight = 2, .transposed = true, .factor = 4};
  return std::nullopt;
}

/// Whether a node of libtorch's own computes a gradient by what this thread calls; a forward pass that is made again, within such a node or one that a program
/// wrote, is a program's.
bool is_autograds_own() {
  const auto node = torch::autograd::get_current_node();
  return node != nullptr && node->is_traceable() && node.get() != nn::recomputed_for();
}

/// In a backward of the program's own, without gradients, nothing tells a layer's product from a gradient's.
void refuse_what_may_be_a_gradient(const std::string& path) {
  const auto node = torch::autograd::get_current_node();
  require(node == nullptr || at::GradMode::is_enabled() || nn::recomputing(), "LoRA of '", path,
          "', libtorch's own Linear: a backward of the program's own multiplies by its weight without gradients, and nothing tells whether that is the layer, "
          "which has a term, or a gradient, which has none; build the layer as tessera::nn::Linear, or make the layer's pass under at::AutoGradMode(true)");
}

class ProductTerms final : public nn::OperatorWatcher {
 public:
  explicit ProductTerms(std::vector<PlainTerm> terms) : terms_(std::move(terms)) {}

  void before(const c10::OperatorHandle&, torch::jit::Stack&) override {}

  bool instead(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const auto where = product_arguments(op);
    if (!where || is_autograds_own()) return false;
    const size_t first = stack.size() - where->count;
    const PlainTerm* const term = term_of(stack[first + where->weight].toTensor(), where->transposed);
    if (term == nullptr) return false;
    refuse_what_may_be_a_gradient(term->path);
    const at::Tensor x = stack[first + where->x].toTensor();
    const at::Scalar scale = where->factor ? stack[first + *where->factor].toScalar().toDouble() * term->scale : term->scale;
    op.callBoxed(&stack);
    const at::Tensor y = std::move(stack.back()).toTensor();
    nn::Dropout dropout = term->dropout;
    const at::Tensor seen = dropout ? dropout(x) : x;
    const auto in = [&](const at::Tensor& matrix) { return matrix.to(y.scalar_type()); };
    stack.back() = at::add(y, at::linear(at::linear(in(seen), in(term->a)), in(term->b)), scale);
    return true;
  }

 private:
  const PlainTerm* term_of(const at::Tensor& matrix, bool transposed) const {
    if (matrix.dim() != 2 || !matrix.has_storage()) return nullptr;
    for (const PlainTerm& term : terms_) {
      require(
          nn::slice_of(term.a).is_whole(), "LoRA of '", term.path,
          "', libtorch's own Linear: its matrices have been sharded, and nothing gathers them there; build the layer as tessera::nn::Linear, or replicate it "
          "(DDP, ZeRO 1 and 2)");
      if (runs_as(matrix, term.weight, transposed) && matrix.is_alias_of(term.weight) && matrix.storage_offset() == term.weight.storage_offset()) return &term;
    }
    return nullptr;
  }

  /// Of a square weight the transpose has the shape, too.
  static bool runs_as(const at::Tensor& matrix, const at::Tensor& weight, bool transposed) {
    for (const int64_t d : {0, 1}) {
      const int64_t of_weight = transposed ? 1 - d : d;
      if (matrix.size(d) != weight.size(of_weight) || (matrix.size(d) > 1 && matrix.stride(d) != weight.stride(of_weight))) return false;
    }
    return true;
  }

  std::vector<PlainTerm> terms_;
};

}  // namespace

Attachment attach_to_products(std::vector<PlainTerm> terms) {
  if (terms.empty()) return {};
  auto watch = std::make_shared<nn::OperatorWatch>(std::make_shared<ProductTerms>(std::move(terms)));
  watch->wake();
  return Attachment([watch]() mutable { watch.reset(); });
}

}  // namespace tessera::lora
