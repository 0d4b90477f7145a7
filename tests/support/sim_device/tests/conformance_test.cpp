// Every operator of libtorch whose arguments can be made up, on the CPU and on the simulated device: the same bits, or an error on both.

#include <cstring>
#include <set>
#include <string_view>

#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>

#include "tests/support/sim_device/tests/support.h"

namespace tessera::sim {
namespace {

using c10::IValue;
using ::testing::UnorderedElementsAreArray;

// Of families that are not for a CUDA tensor of plain numbers, whose results are not defined (empty), or which need arguments that fit together.
constexpr const char* kLeftOut[] = {"cuda",
                                    "cudnn",
                                    "miopen",
                                    "mkldnn",
                                    "mps",
                                    "quantize",
                                    "sparse",
                                    "nested",
                                    "jagged",
                                    "test",
                                    "fbgemm",
                                    "_sobol",
                                    "dequant",
                                    "hpu",
                                    "xnn",
                                    "vulkan",
                                    "coalesce",
                                    "_cslt",
                                    "_cufft",
                                    "q_",
                                    "qint",
                                    "int_repr",
                                    "empty",
                                    "_to_cpu",
                                    "pin",
                                    "set_",
                                    "nccl",
                                    "rnn",
                                    "lstm",
                                    "gru",
                                    "_scaled",
                                    "segment",
                                    "from_file",
                                    "resize",
                                    "record_stream",
                                    "data_ptr",
                                    "version",
                                    "_foreach_map",
                                    "manual_seed",
                                    "backward",
                                    "efficient",
                                    "_flash",
                                    "retain",
                                    "_weight_int",
                                    "dyn_quant",
                                    "spmm",
                                    "_assert",
                                    "print",
                                    "lift",
                                    "_dual",
                                    "_fw_primal",
                                    "names",
                                    "rename",
                                    "refine",
                                    "align",
                                    "storage",
                                    "_batch_norm_with",
                                    "_no_update",
                                    "native_batch_norm",
                                    "qparams",
                                    "lstsq",
                                    "is_same",
                                    "device",
                                    "get_device",
                                    "fused_moving",
                                    "_local_scalar",
                                    "_weight_norm_interface"};  // of whose norms, as large as what is made up here, it writes the first row alone

// Those that differ: libtorch's code for them is no kernel of a device, but a loop of the host over the tensor's bytes, wherever they lie. Nothing of tessera's
// calls them.
const std::set<std::string> kDiffer{"aten::_saturate_weight_to_fp16", "aten::range.out_"};

bool left_out(const std::string& name) {
  return std::any_of(std::begin(kLeftOut), std::end(kLeftOut), [&](const char* part) { return name.find(part) != std::string::npos; });
}

bool same(const IValue& a, const IValue& b) {
  if (a.isTensorList() && b.isTensorList()) {
    const auto x = a.toTensorVector(), y = b.toTensorVector();
    return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin(), [](const at::Tensor& one, const at::Tensor& other) { return same(one, other); });
  }
  if (!a.isTensor()) return a.isNone() || !(a.isScalar() || a.isBool()) || (a.isDouble() && std::isnan(a.toDouble())) || a == b;
  if (!b.isTensor() || a.toTensor().defined() != b.toTensor().defined()) return false;
  if (!a.toTensor().defined()) return true;
  const at::Tensor x = a.toTensor(), y = b.toTensor();
  if (x.sizes() != y.sizes() || x.scalar_type() != y.scalar_type()) return false;
  if (x.layout() != at::kStrided || x.numel() == 0 || !x.has_storage() || !y.has_storage()) return true;
  const at::Tensor left = x.resolve_conj().resolve_neg().contiguous(), right = y.cpu().resolve_conj().resolve_neg().contiguous();
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0 ||
         at::allclose(left.to(at::kComplexDouble), right.to(at::kComplexDouble), 0, 0, /*equal_nan=*/true);  // zeros of either sign, NaNs of any bits
}

/// An argument that may do; none where no value is known for its type. `number` tells tensors apart.
std::optional<IValue> made_up(const c10::Argument& argument, int& number) {
  const std::string type = argument.type()->str();
  const auto tensor = [&] {
    at::manual_seed(static_cast<uint64_t>(10 + number++));
    return at::rand({4, 4}) + 0.25;
  };
  if (type == "Tensor") return tensor();
  if (type == "Tensor[]") return std::vector<at::Tensor>{tensor(), tensor()};
  if (argument.default_value()) return *argument.default_value();
  if (type == "int" || type == "SymInt") return 1;
  if (type == "float") return 0.5;
  if (type == "Scalar" || type == "number") return 1.5;
  if (type == "bool") return false;
  if (type == "int[]" || type == "SymInt[]") return std::vector<int64_t>{1, 0};
  if (argument.type()->kind() == c10::TypeKind::OptionalType) return IValue();
  return std::nullopt;
}

IValue moved(const IValue& value, at::Device device) {
  if (value.isTensor()) return value.toTensor().to(device);
  if (!value.isTensorList()) return value;
  std::vector<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.to(device));
  return list;
}

/// What the operator returns, or the error.
std::optional<std::vector<IValue>> call(const c10::OperatorHandle& op, std::vector<IValue> arguments, std::string& error) {
  at::manual_seed(1);
  try {
    op.callBoxed(&arguments);
    return arguments;
  } catch (const std::exception& e) {
    error = e.what();
    error = error.substr(0, error.find('\n'));
    return std::nullopt;
  }
}

class Conformance : public SimDevice {};

TEST_F(Conformance, OperatorsGiveTheCpusBits) {
  const at::NoGradGuard no_grad;
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}  // that results had other shapes
  } silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  int compared = 0;
  std::set<std::string> different;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::") || left_out(name.name)) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    std::vector<IValue> on_cpu, on_device;
    int tensors = 0;
    bool known = true;
    for (const auto& argument : op->schema().arguments()) {
      const auto value = made_up(argument, tensors);
      if (!(known = value.has_value())) break;
      on_cpu.push_back(*value);
      on_device.push_back(moved(*value, first));
    }
    std::string error;
    if (!known || tensors == 0) continue;
    const auto want = call(*op, on_cpu, error);
    if (!want) continue;
    HappensBefore::get().take_reports();
    const auto got = call(*op, on_device, error);
    ++compared;
    bool equal = got && reports().empty();
    close_opened_pages();
    for (size_t i = 0; equal && i < want->size(); ++i) equal = same((*want)[i], (*got)[i]);
    for (size_t i = 0; equal && i < on_cpu.size(); ++i) equal = same(on_cpu[i], on_device[i]);
    if (!equal) different.insert(full);
    if (!equal && !kDiffer.contains(full)) std::cout << full << ": " << (got ? "differs" : error) << "\n";
  }
  EXPECT_GT(compared, 1400);
  EXPECT_THAT(different, UnorderedElementsAreArray(kDiffer));
}

}  // namespace
}  // namespace tessera::sim
