#include "tessera/nn/record_events.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/nn/saved_tensors.h"

// What an operator is made of differs from device to device and says nothing: of operators inside each other the innermost that move data are events. Those
// that only look at memory otherwise, or take some without writing it, move none.

namespace tessera::nn {
namespace {

template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor());
  if (!value.isList()) return;
  for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, visit);
}

bool takes_memory_alone(const std::string& name) { return name.starts_with("aten::empty") || name.starts_with("aten::new_empty"); }

class OperatorEvents final : public OperatorHooks {
 public:
  explicit OperatorEvents(EventStream& stream) : stream_(stream) {}

  void call(OperatorCall& operation) override {
    OperatorEvent ran{
        .name = operation.name(), .flops = product_flops(operation.name(), operation.arguments()), .again = recomputing(), .beside = BesidePasses::now()};
    Event event;
    Sides from, to;
    const auto& declared = operation.schema().arguments();
    for (size_t i = 0; i < declared.size(); ++i) {
      const auto* alias = declared[i].alias_info();
      const c10::IValue& argument = operation.arguments()[i];
      if (argument.isBool() && declared[i].name() == "is_causal") ran.causal = argument.toBool();  // as attention calls it on every device, backward as well
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        note(tensor, event.reads, ran.read_bytes, from);
        if (alias != nullptr && alias->isWrite()) note(tensor, event.writes, ran.written_bytes, to);
      });
    }
    const auto multiplied = multiplied_in(operation);
    const int64_t before = told_;
    operation.run(/*watch_inside=*/ran.flops == 0 && (operation.composite() || !ran.name.starts_with("aten::")));
    if (told_ != before || takes_memory_alone(ran.name)) return;
    const auto& returned = operation.schema().returns();
    for (size_t i = 0; i < returned.size(); ++i) {
      const bool made = returned[i].alias_info() == nullptr;
      for_each_tensor(operation.results()[i], [&](const at::Tensor& tensor) {
        if (ran.dtype == at::ScalarType::Undefined) ran.shape = tensor.sizes().vec(), ran.dtype = tensor.scalar_type();
        if (made) note(tensor, event.writes, ran.written_bytes, to);
      });
    }
    if (ran.written_bytes == 0 && ran.flops == 0) return;
    ran.dtype = multiplied.value_or(ran.dtype);
    ran.crosses = (from.host && to.device) || (from.device && to.host);
    ran.on_host = to.host && !to.device;
    ++told_;
    event.what = std::move(ran);
    stream_.add(std::move(event));
  }

 private:
  /// The type of what is multiplied, if all of it is of one: sums of narrow numbers may be handed on in a wider one.
  static std::optional<at::ScalarType> multiplied_in(const OperatorCall& operation) {
    if (!operation.name().starts_with("aten::_scaled_dot_product_")) return std::nullopt;
    constexpr size_t kQuery = 1;  // behind the gradient, in a backward pass; a forward's key is of the same type
    const c10::IValue& query = operation.arguments()[kQuery];
    return query.isTensor() ? std::optional(query.toTensor().scalar_type()) : std::nullopt;
  }

  /// Where tensors lie.
  struct Sides {
    bool host = false, device = false;
  };

  static void note(const at::Tensor& tensor, std::vector<int64_t>& storages, int64_t& bytes, Sides& sides) {
    bytes += static_cast<int64_t>(tensor.nbytes());
    const StorageNumber storage = storage_number(tensor);
    if (storage.number == 0) return;
    storages.push_back(storage.number);
    (storage.on_host ? sides.host : sides.device) = true;
  }

  EventStream& stream_;
  int64_t told_ = 0;  ///< operators that became events
};

}  // namespace

RecordEvents::RecordEvents(EventStream& stream) : listening_(stream), memory_(stream), operators_(std::make_shared<OperatorEvents>(stream)) {}

}  // namespace tessera::nn
