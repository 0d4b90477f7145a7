#include "cli/bench/attention.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include "cli/bench/measure.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/models/model.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/meta.h"

namespace tessera::bench {
namespace {

struct OneCoreImpl : nn::Module {
  OneCoreImpl() { register_module("core", core); }
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) { return core(q, k, v); }
  nn::AttentionCore core;
};
TESSERA_MODULE(OneCore);

std::vector<at::Tensor> inputs_of(const AttentionCase& what, int64_t columns) {
  std::vector<at::Tensor> in;
  for (const int64_t heads : {what.heads, what.kv_heads, what.kv_heads, what.heads}) {
    in.push_back(at::randn({1, columns, heads, what.features}, at::make_generator<at::CPUGeneratorImpl>(1)).to(what.device, what.dtype));
  }
  for (size_t i = 0; i < 3; ++i) in[i].requires_grad_();
  return in;
}

double microseconds(at::Device device, const std::function<void()>& call) {
  wait_for(device);
  const auto start = std::chrono::steady_clock::now();
  call();
  wait_for(device);
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

/// Of a forward and a backward pass on `columns` columns, from when all ranks begin to when all are done.
double pass_us(OneCore& model, const AttentionCase& what, int64_t columns, const comm::Group& group) {
  const auto in = inputs_of(what, columns);
  comm::barrier(group);
  return microseconds(what.device, [&] {
    model(in[0], in[1], in[2]).backward(in[3]);
    wait_for(what.device);  // before the others hear of it
    comm::barrier(group);
  });
}

/// Rounds that fill the time, when the first one took so long.
int64_t rounds_of(const Limits& limits, int64_t cases, double first_us) {
  if (limits.iterations > 0) return limits.iterations;
  return std::clamp<int64_t>(static_cast<int64_t>(static_cast<double>(cases) * limits.seconds * 1e6 / std::max(1.0, first_us)), 3, 50);
}

double slowest(const comm::Group& group, double value) {
  const at::Tensor most = at::full({1}, value, at::device(at::kCPU).dtype(at::kDouble));
  comm::all_reduce(group, most, comm::Op::Max);
  return most.item<double>();
}

const char* dtype_name(at::ScalarType dtype) { return dtype == at::kBFloat16 ? "bf16" : "fp32"; }

/// Counts what a core leaves for backward, and has it compute as told.
class CoreBytes : public nn::Interceptor {
 public:
  CoreBytes(const MemoryTracker& tracker, kernels::KernelChoice choice) : tracker_(tracker), choice_(choice) {}

  nn::Values call(nn::Module& /*module*/, nn::Values inputs, const nn::Next& next) override {
    const kernels::KernelChoiceGuard guard(choice_);
    for (size_t i = 0; i < 3; ++i) bytes += static_cast<int64_t>(inputs[i].toTensor().nbytes());
    const int64_t before = tracker_.current();
    nn::Values outputs = next(std::move(inputs));
    bytes += tracker_.current() - before;
    return outputs;
  }

  int64_t bytes = 0;

 private:
  const MemoryTracker& tracker_;
  kernels::KernelChoice choice_;
};

}  // namespace

std::vector<std::string> attention_methods() { return {"ring", "ring_no_overlap", "all_gather", "ulysses", "ring_full"}; }

ContextParallelOptions attention_options(const std::string& method) {
  if (method == "ring") return {};
  if (method == "ring_no_overlap") return {.overlap = false};
  if (method == "all_gather") return {.method = ContextMethod::AllGather};
  if (method == "ulysses") return {.method = ContextMethod::Ulysses};
  invariant(method == "ring_full", "no way to attend over ranks is called ", method);
  return {.method = ContextMethod::RingFull};
}

std::vector<AttentionRow> measure_attention(const comm::World& world, comm::Recorder& recorder, const AttentionCase& what, const Limits& limits) {
  const comm::Group& group = world.group();
  const SequenceCut cut = SequenceCut::head_tail(what.length, group.size());
  std::vector<AttentionRow> rows;
  for (const auto& method : what.methods) {
    rows.push_back({.method = method,
                    .backend = engine_for(group, what.device),
                    .dtype = dtype_name(what.dtype),
                    .length = what.length,
                    .heads = what.heads,
                    .kv_heads = what.kv_heads,
                    .ranks = group.size(),
                    .time_us = std::numeric_limits<double>::infinity()});
  }
  OneCore alone;
  double one = std::numeric_limits<double>::infinity();
  const auto round = [&] {
    one = std::min(one, pass_us(alone, what, what.length, group));
    for (AttentionRow& row : rows) {
      OneCore model;
      const auto context = context_parallel(model, group, attention_options(row.method), "core");
      context->set_cut(cut);
      recorder.clear();
      row.time_us = std::min(row.time_us, pass_us(model, what, cut.columns(group.rank()), group));
      row.sent_bytes = 0;
      for (const auto& record : recorder.records()) row.sent_bytes += record.sent_bytes;
    }
  };
  const double first = slowest(group, microseconds(what.device, round));
  for (AttentionRow& row : rows) row.time_us = one = std::numeric_limits<double>::infinity();  // that round has warmed up
  for (int64_t left = rounds_of(limits, std::ssize(rows) + 1, first); left > 0; --left) round();
  for (AttentionRow& row : rows) {
    row.time_us = slowest(group, row.time_us);
    row.other_us = slowest(group, one);
  }
  return rows;
}

AttentionRow measure_packed(const AttentionCase& what, int64_t documents, const Limits& limits) {
  const int64_t each = (what.length + documents - 1) / documents;
  const at::TensorOptions here(what.device);
  const at::Tensor ids = at::arange(what.length, here.dtype(at::kLong)).floor_divide(each).unsqueeze(0);
  const at::Tensor visible = ids.unsqueeze(2).eq(ids.unsqueeze(1)).unsqueeze(1).bitwise_and(at::ones({what.length, what.length}, here.dtype(at::kBool)).tril());
  nn::AttentionCore core;
  const auto in = inputs_of(what, what.length);
  const auto tiles = [&] { core(in[0], in[1], in[2], std::nullopt, ids).backward(in[3]); };
  const auto mask = [&] { nn::masked_attention(in[0], in[1], in[2], visible).backward(in[3]); };
  AttentionRow row{
      .kind = "packed", .dtype = dtype_name(what.dtype), .length = what.length, .heads = what.heads, .kv_heads = what.kv_heads, .documents = documents};
  const double first = microseconds(what.device, tiles) + microseconds(what.device, mask);
  row.time_us = row.other_us = std::numeric_limits<double>::infinity();
  for (int64_t left = rounds_of(limits, 2, first); left > 0; --left) {
    row.time_us = std::min(row.time_us, microseconds(what.device, tiles));
    row.other_us = std::min(row.other_us, microseconds(what.device, mask));
  }
  return row;
}

AttentionRow measure_window(const AttentionCase& what, int64_t window, const Limits& limits) {
  nn::AttentionCore within(nn::AttentionReach{.window = window}), whole;
  const at::Tensor seen = at::ones({what.length, what.length}, at::TensorOptions(what.device).dtype(at::kBool)).tril().triu(1 - window);
  const at::Tensor visible =
      at::zeros(seen.sizes(), seen.options().dtype(what.dtype)).masked_fill_(seen.logical_not(), -std::numeric_limits<double>::infinity());
  const auto in = inputs_of(what, what.length);
  const auto mask = [&] {
    const auto of = [&](size_t i) { return in[i].transpose(1, 2); };
    at::scaled_dot_product_attention(of(0), of(1), of(2), visible, /*dropout_p=*/0, /*is_causal=*/false, /*scale=*/{}, what.heads != what.kv_heads)
        .backward(of(3));
  };
  const std::array<std::function<void()>, 3> ways{[&] { within(in[0], in[1], in[2]).backward(in[3]); }, [&] { whole(in[0], in[1], in[2]).backward(in[3]); },
                                                  mask};
  AttentionRow row{.kind = "window", .dtype = dtype_name(what.dtype), .length = what.length, .heads = what.heads, .kv_heads = what.kv_heads, .window = window};
  const std::array<double*, 3> times{&row.time_us, &row.whole_us, &row.other_us};
  double first = 0;
  for (const auto& way : ways) first += microseconds(what.device, way);
  for (double* time : times) *time = std::numeric_limits<double>::infinity();
  for (int64_t left = rounds_of(limits, 3, first); left > 0; --left) {
    for (size_t i = 0; i < ways.size(); ++i) *times[i] = std::min(*times[i], microseconds(what.device, ways[i]));
  }
  return row;
}

double share_of_attention(int64_t length, kernels::KernelChoice choice) {
  ModelConfig config;
  config.family = "llama";
  config.dim = 256;
  config.layers = 1;
  config.heads = config.kv_heads.emplace(4);
  config.ffn_dim = 704;
  config.vocab_size = 37;
  config.max_seq_len = length;
  auto model = on_meta([&] { return make_model(config); });
  materialize(*model, 1, at::kMeta);
  const at::Tensor tokens = at::zeros({1, length}, at::TensorOptions(at::kLong).device(at::kMeta));
  const TokenPlaces packed{.positions = {}, .document_ids = tokens};
  const at::Tensor stream = model->embed(tokens, packed).detach().requires_grad_();
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  const auto core = std::make_shared<CoreBytes>(tracker, choice);
  const auto attached = nn::attach(*model, model->attention_pattern(), core);
  const at::Tensor out = model->run_blocks(stream, 0, 1, length, packed);
  return static_cast<double>(core->bytes) / static_cast<double>(tracker.current());
}

}  // namespace tessera::bench
