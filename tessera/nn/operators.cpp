#include "tessera/nn/operators.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "tessera/core/ambient.h"
#include "tessera/core/error.h"
#include "tessera/core/events.h"
#include "tessera/nn/saved_tensors.h"

namespace tessera::nn {

namespace {

// Below autograd, above the choice of a backend and the kernels. libtorch reserves it for tensors without data, and registers nothing there. (Keys that count
// as backends will not do: operators written as a composite have kernels for each of those.)
constexpr auto kKey = c10::DispatchKey::Fake;

const Ambient<const OperatorLink*> current;

/// Sets who is asked, and restores who was.
class Asked {
 public:
  explicit Asked(const OperatorLink* link) : before_(std::exchange(*current, link)) {}
  ~Asked() { *current = before_; }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

 private:
  const OperatorLink* before_;
};

void pass(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto rest = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  const OperatorLink* const asked = *current;
  if (asked == nullptr) {
    op.redispatchBoxed(rest, stack);
    return;
  }
  OperatorCall operation(op, rest, *stack, asked);
  const Asked nobody(nullptr);
  operation.link().hooks->call(operation);
}

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&pass>()); }

}  // namespace

void OperatorCall::run(bool watch_inside) {
  const OperatorLink* const inside = watch_inside ? inside_ : link_->outer;
  if (link_->outer != nullptr) {
    OperatorCall further(op_, keys_, stack_, link_->outer);
    further.inside_ = inside;
    further.link_->hooks->call(further);
    return;
  }
  const Asked watching(inside);
  op_.redispatchBoxed(keys_, &stack_);
}

struct OperatorScope::Guard {
  explicit Guard(std::shared_ptr<OperatorHooks> hooks) : link{std::move(hooks), *current} {}
  OperatorLink link;
  Asked asked{&link};
  c10::impl::IncludeDispatchKeyGuard include{kKey};
};

OperatorScope::OperatorScope(std::shared_ptr<OperatorHooks> hooks) {
  invariant(hooks != nullptr, "OperatorScope: no hooks given");
  guard_ = std::make_unique<Guard>(std::move(hooks));
}
OperatorScope::~OperatorScope() = default;

bool updates_statistics(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  constexpr std::array kNorms{"aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"};
  return std::ranges::any_of(kNorms, [&](const char* norm) { return name == norm; }) && arguments[5].toBool();
}

bool writes_argument(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, size_t index) {
  const auto* const alias = schema.arguments()[index].alias_info();
  if (alias != nullptr && alias->isWrite()) return true;
  return std::ranges::find(kStatistics, index) != kStatistics.end() && updates_statistics(schema.name(), arguments);
}

double product_flops(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  const auto sizes = [&](size_t i) { return arguments[i].toTensor().sizes(); };
  // The product of a [..., m, k] and b [..., k, n]: every element of a meets n elements of b.
  const auto product = [&](size_t a, size_t b) { return 2.0 * static_cast<double>(arguments[a].toTensor().numel()) * static_cast<double>(sizes(b).back()); };
  // q [B, H, S, D] at `q`, k [B, K, L, D] behind it: a product is 2 B H S L D.
  const auto attention = [&](size_t q, int products) {
    return products * 2.0 * static_cast<double>(arguments[q].toTensor().numel()) * static_cast<double>(sizes(q + 1)[2]);
  };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::_scaled_mm") return product(0, 1);
  if (name == "aten::addmm" || name == "aten::baddbmm") return product(1, 2);
  // Each row that is of a group meets one matrix of the size of a weight's.
  const auto grouped = [&](size_t list, int64_t matrix) {
    const auto groups = arguments[list].toIntVector();
    return 2.0 * static_cast<double>(std::accumulate(groups.begin(), groups.end(), int64_t{0})) * static_cast<double>(matrix);
  };
  if (name == "tessera::grouped_product") return grouped(3, sizes(1)[1] * sizes(1)[2]);
  if (name == "tessera::grouped_product_within") return grouped(2, sizes(0)[1] * sizes(1)[1]);
  constexpr std::string_view kAttention = "aten::_scaled_dot_product_", kBackward = "_backward";
  if (!name.starts_with(kAttention)) return 0;
  std::string_view kernel = std::string_view(name).substr(kAttention.size());
  const bool backward = kernel.ends_with(kBackward);
  if (backward) kernel.remove_suffix(kBackward.size());
  // What attention is on each kind of device; that by products (attention_math) is seen by its products.
  for (const std::string_view whole :
       {"flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"}) {
    if (kernel == whole) return backward ? attention(1, 5) : attention(0, 2);  // one of the five makes the weights again
  }
  return 0;
}

void FlopCounter::call(OperatorCall& operation) {
  const double product = product_flops(operation.name(), operation.arguments());
  flops_ += product;
  if (recomputing()) recomputed_ += product;
  if (BesidePasses::now()) beside_ += product;
  operation.run(/*watch_inside=*/product == 0);  // what a product is made of is the same product
}

}  // namespace tessera::nn
