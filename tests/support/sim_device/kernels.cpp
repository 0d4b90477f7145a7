// The fused kernels of tessera on the simulated devices: the CPU's routines, or CUDA's, on the same bytes, each a piece of work that the detector sees. And the
// attention that CUDA has by other names than the CPU, with its layouts: log-sum-exps in whole rows of 32 where the memory-efficient kernel is asked for.

#include <cstdlib>
#include <functional>
#include <limits>
#include <string_view>
#include <tuple>
#include <type_traits>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "tessera/kernels/cuda/routines.cuh"
#include "tessera/kernels/routines.h"
#include "tests/support/sim_device/aliases.h"
#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/graph.h"
#include "tests/support/sim_device/memory.h"
#include "tests/support/sim_device/operators.h"

namespace tessera::sim {

namespace {

using kernels::Routines;

/// The CPU's, or with TESSERA_TEST_DEVICE=sim_kernels those of kernels/cuda, each thread of each block on the host (cuda_on_host/launch.h).
const Routines& computing() {
  static const Routines routines = [] {
    Routines all = kernels::routines_for(at::empty({0}, at::TensorOptions(at::kCPU)));
    if (std::string_view(std::getenv("TESSERA_TEST_DEVICE")) != "sim_kernels") return all;
    all.rms_norm = kernels::cuda::rms_norm_routines();
    all.layer_norm = kernels::cuda::layer_norm_routines();
    all.pointwise = kernels::cuda::pointwise_routines();
    all.cross_entropy = kernels::cuda::cross_entropy_routines();
    all.dispatch = kernels::cuda::dispatch_routines();
    return all;
  }();
  return routines;
}

/// One call of such a routine, on the stream of the current device, as a launch of CUDA's: its first `writes` tensors are what it writes, the others what
/// it reads.
class OneRoutine {
 public:
  OneRoutine(const at::Tensor& first, size_t writes)
      : device_(c10::impl::VirtualGuardImpl(sim_type()).getDevice()),
        stream_(stream_number(current_stream(device_.index()))),
        sequence_(HappensBefore::get().launch(stream_)),
        writes_(writes) {
    TORCH_CHECK(first.device() == device_, "simulated device: a kernel was launched on the current device, ", device_, ", for memory of ", first.device());
  }

  at::Tensor on_host(const at::Tensor& tensor) {
    const bool writes = seen_++ < writes_;
    if (tensor.defined() && tensor.device() == device_) {
      record_access(tensor, stream_, sequence_, writes, Running::now());
      if (Capture::of(device_.index())) uses_.add(tensor, writes, Running::now());
    }
    return aliases_(tensor);
  }
  template <class Number>
  const Number& on_host(const Number& number) {
    return number;
  }

  /// For a graph that is captured now.
  void take_down(const std::function<void()>& call) const {
    Capture* const capture = Capture::of(device_.index());
    if (!capture) return;
    capture->add([call, uses = uses_](int stream) {
      uses.tell(stream);
      call();
    });
  }

 private:
  c10::Device device_;
  Running running_{"fused kernel"};
  Aliases aliases_;
  Uses uses_;
  int stream_;
  uint64_t sequence_;
  size_t writes_, seen_ = 0;
};

template <auto Group, auto Routine, size_t Writes, class First, class... Args>
auto on_device(const kernels::Routine<void(First, Args...)>&) {
  return +[](First first, Args... args) {
    OneRoutine one(first, Writes);
    const at::Tensor own = one.on_host(first);
    std::tuple<std::decay_t<decltype(one.on_host(args))>...> others{one.on_host(args)...};  // braces: in order
    const auto call = [own, others] { std::apply([&](const auto&... on_host) { ((computing().*Group).*Routine)(own, on_host...); }, others); };
    call();
    one.take_down(call);
  };
}

Routines sim_routines() {
  const Routines& cpu = computing();
  Routines all;
#define TESSERA_ON_DEVICE(group, Group, routine, writes) all.group.routine = on_device<&Routines::group, &kernels::Group::routine, writes>(cpu.group.routine)
  TESSERA_ON_DEVICE(rms_norm, RmsNormRoutines, forward, 3);
  TESSERA_ON_DEVICE(rms_norm, RmsNormRoutines, backward, 3);
  TESSERA_ON_DEVICE(layer_norm, LayerNormRoutines, forward, 4);
  TESSERA_ON_DEVICE(layer_norm, LayerNormRoutines, backward, 4);
  TESSERA_ON_DEVICE(pointwise, PointwiseRoutines, swiglu, 1);
  TESSERA_ON_DEVICE(pointwise, PointwiseRoutines, swiglu_backward, 2);
  TESSERA_ON_DEVICE(pointwise, PointwiseRoutines, bias_activation, 1);
  TESSERA_ON_DEVICE(pointwise, PointwiseRoutines, bias_activation_backward, 3);
  TESSERA_ON_DEVICE(pointwise, PointwiseRoutines, embedding_gradient, 1);
  TESSERA_ON_DEVICE(pointwise, PointwiseRoutines, rope, 1);
  TESSERA_ON_DEVICE(pointwise, PointwiseRoutines, dropout, 1);
  TESSERA_ON_DEVICE(pointwise, PointwiseRoutines, accumulate, 1);
  TESSERA_ON_DEVICE(cross_entropy, CrossEntropyRoutines, forward, 2);
  TESSERA_ON_DEVICE(cross_entropy, CrossEntropyRoutines, backward, 1);
  TESSERA_ON_DEVICE(cross_entropy, CrossEntropyRoutines, in_place, 2);
  TESSERA_ON_DEVICE(cross_entropy, CrossEntropyRoutines, part, 3);
  TESSERA_ON_DEVICE(cross_entropy, CrossEntropyRoutines, part_gradient, 1);
  TESSERA_ON_DEVICE(cross_entropy, CrossEntropyRoutines, sum, 1);
  TESSERA_ON_DEVICE(cross_entropy, CrossEntropyRoutines, check_labels, 0);
  TESSERA_ON_DEVICE(dispatch, DispatchRoutines, choose, 1);
  TESSERA_ON_DEVICE(dispatch, DispatchRoutines, plan, 3);
  TESSERA_ON_DEVICE(dispatch, DispatchRoutines, gather, 1);
  TESSERA_ON_DEVICE(dispatch, DispatchRoutines, combine, 1);
  TESSERA_ON_DEVICE(dispatch, DispatchRoutines, weigh, 1);
#undef TESSERA_ON_DEVICE
  return all;
}

constexpr int64_t kRow = 32;

/// What CUDA's kernels refuse, in libtorch's words.
void check_efficient(const at::Tensor& q, const at::Tensor& k) {
  TORCH_CHECK(q.size(3) % 4 == 0 && k.size(3) % 4 == 0, "cutlassF: no kernel found to launch!");
}
void check_flash(const at::Tensor& q, const at::Tensor& k) {
  TORCH_CHECK(q.size(3) % 8 == 0 && k.size(3) % 8 == 0, "FlashAttention: head_size must be a multiple of 8, this is ensured by padding!");
  TORCH_CHECK(q.element_size() == 2, "FlashAttention only support fp16 and bf16 data type");
  TORCH_CHECK(q.size(3) <= 256, "FlashAttention only supports head dimension at most 256");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                     const std::optional<at::Tensor>& bias, bool, double dropout, bool causal,
                                                                     std::optional<double> scale) {
  check_efficient(q, k);
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, bias, scale);
  const at::Tensor padded = at::constant_pad_nd(sums, {0, (kRow - sums.size(2) % kRow) % kRow}, std::numeric_limits<double>::infinity());
  const at::Tensor none = at::zeros({}, q.options().dtype(at::kLong));
  return {out, padded, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                                                              const at::Tensor& v, const at::Tensor& bias, const at::Tensor& out,
                                                                              const at::Tensor& sums, const at::Tensor&, const at::Tensor&, double dropout,
                                                                              std::array<bool, 4>, bool causal, std::optional<double> scale) {
  check_efficient(q, k);
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, sums.narrow(2, 0, q.size(2)).contiguous(), dropout, causal,
                                                                               bias.defined() ? std::optional(bias) : std::nullopt, scale);
  return {dq, dk, dv, at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor> flash(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout, bool causal, bool, std::optional<double> scale) {
  check_flash(q, k);
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, {}, scale);
  const at::Tensor none = at::zeros({}, q.options().dtype(at::kLong));
  return {out, sums, at::Tensor(), at::Tensor(), q.size(2), k.size(2), none, none, at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                              const at::Tensor& out, const at::Tensor& sums, const at::Tensor&, const at::Tensor&, c10::SymInt,
                                                              c10::SymInt, double dropout, bool causal, const at::Tensor&, const at::Tensor&,
                                                              std::optional<double> scale) {
  check_flash(q, k);
  TORCH_CHECK(q.size(2) > 0 && k.size(2) > 0, "CUDA error: invalid configuration argument");
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, sums, dropout, causal, {}, scale);
}

}  // namespace

void register_kernels() {
  static const Routines routines = sim_routines();
  kernels::register_routines(sim_type(), routines);
  static auto* const library = new torch::Library(torch::Library::IMPL, "aten", sim_key(), __FILE__, __LINE__);
  library->impl("_scaled_dot_product_efficient_attention", &efficient);
  library->impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
  library->impl("_scaled_dot_product_flash_attention", &flash);
  library->impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
}

}  // namespace tessera::sim
