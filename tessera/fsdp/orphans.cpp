#include "tessera/fsdp/orphans.h"

#include <memory>
#include <string>
#include <unordered_map>

#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/operator_use.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/operator_watch.h"

// The hooks that gathered are gone with their owner, and the parameters are the program's and live on: only a watch over all operators of the thread can see
// them used. It costs one look-up per operand, goes by the tensor's address as long as a weak pointer says that it is still that tensor, and ends by itself
// with the last of them. A backward pass of a forward from before may be given no parameter at all, and brings whole gradients, of this rank alone: those are
// seen as they arrive.

namespace tessera {
namespace {

class Orphans final : public nn::OperatorWatcher {
 public:
  explicit Orphans(const ShardedUnits& units) {
    for (size_t unit = 0; unit < units.size(); ++unit) {
      for (const FlatParameters& flat : units.flats(unit)) {
        for (size_t i = 0; i < flat.parameters().size(); ++i) {
          const auto& [name, tensor, aliases] = flat.parameters()[i];
          known_.emplace(tensor.unsafeGetTensorImpl(), Known{Weak(tensor.getIntrusivePtr()), flat.slice_storage(i), name});
          if (auto* const dispatcher = nn::GradientDispatcher::find(tensor)) {
            listening_.add(dispatcher->listen_arriving([slice = flat.slice_storage(i), name](const at::Tensor& parameter) {
              require(!is_slice(parameter, slice), "fully_shard: '", name,
                      "' got a gradient, and what sums it over the ranks is gone; keep what fully_shard returned until backward() has returned, or call "
                      "unshard(model) before it goes");
            }));
          }
        }
      }
    }
  }

  void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const c10::FunctionSchema& schema = op.schema();
    const size_t count = schema.arguments().size(), first = stack.size() - count;
    const at::ArrayRef<c10::IValue> arguments(stack.data() + first, count);
    for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace& place) { check(tensor, schema, arguments, place); });
    if (++calls_ % kBetweenLooks == 0) std::erase_if(known_, [](const auto& item) { return item.second.alive.expired(); });
  }

  bool done() const override { return known_.empty(); }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Known {
    Weak alive;
    const c10::StorageImpl* slice;
    std::string name;
  };
  static constexpr int64_t kBetweenLooks = 256;

  /// Somebody else may have given it memory since, as whoever wraps it anew does.
  static bool is_slice(const at::Tensor& parameter, const c10::StorageImpl* slice) {
    return parameter.has_storage() && parameter.storage().unsafeGetStorageImpl() == slice;
  }

  void check(const at::Tensor& tensor, const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, const OperandPlace& place) const {
    const auto found = known_.find(tensor.unsafeGetTensorImpl());
    if (found == known_.end() || found->second.alive.expired()) return;
    if (!is_slice(tensor, found->second.slice)) return;
    require(operator_use(schema, arguments, place, tensor) != OperatorUse::Whole, "fully_shard: ", schema.name(), " was given '", found->second.name,
            "', of which this rank has a slice, and what gathered it is gone; keep what fully_shard returns for as long as the model is used, or call "
            "unshard(model) before it goes");
  }

  std::unordered_map<const c10::TensorImpl*, Known> known_;
  Attachment listening_;
  int64_t calls_ = 0;
};

}  // namespace

void refuse_orphans(const ShardedUnits& units) { nn::watch_until_done(std::make_shared<Orphans>(units)); }

}  // namespace tessera
