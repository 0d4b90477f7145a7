// Attention over ranks beside attention on one device: forward and backward of one core, causal, ranks as threads over shared memory, one thread each. A round
// measures one device (on every rank at once, so that all share the machine alike) and then each method, and minima over rounds are compared, since other
// programs come and go. `rate_over_one`: each rank's share of the work per second over one device's work per second; 1 is a perfect split.
//
// Then one device with packed documents, as tiles and with a mask.
//
//   tessera_context_parallel_bench [S = 8192] [ranks = 2] [heads = 8] [kv_heads = 8] [rounds = 5] [bf16]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/context_parallel/context_parallel.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/attention.h"

namespace tessera {
namespace {

struct OneCoreImpl : nn::Module {
  OneCoreImpl() { register_module("core", core); }
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) { return core(q, k, v); }
  nn::AttentionCore core;
};
TESSERA_MODULE(OneCore);

struct Sizes {
  int64_t length = 8192;
  int ranks = 2;
  int64_t heads = 8, kv_heads = 8, features = 64;
  int rounds = 5;
  at::ScalarType dtype = at::kFloat;
};

/// Seconds of a forward and a backward pass on `columns` columns.
double seconds(OneCore& model, const Sizes& sizes, int64_t columns, const comm::Group& group) {
  std::vector<at::Tensor> in;
  for (const int64_t heads : {sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads}) {
    in.push_back(at::randn({1, columns, heads, sizes.features}, at::make_generator<at::CPUGeneratorImpl>(1)).to(sizes.dtype));
  }
  for (size_t i = 0; i < 3; ++i) in[i].requires_grad_();
  comm::barrier(group);
  const auto start = std::chrono::steady_clock::now();
  model(in[0], in[1], in[2]).backward(in[3]);
  comm::barrier(group);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// One device with packed documents: as tiles, and with the mask that holds all scores.
void run_packed(const Sizes& sizes) {
  for (const int64_t documents : {4, 32}) {
    const int64_t length = std::min<int64_t>(sizes.length, 2048), each = (length + documents - 1) / documents;
    const at::Tensor ids = (at::arange(length) / each).floor().to(at::kLong).unsqueeze(0);
    const at::Tensor visible = ids.unsqueeze(2).eq(ids.unsqueeze(1)).unsqueeze(1).bitwise_and(at::ones({length, length}, at::kBool).tril());
    nn::AttentionCore core;
    std::map<std::string, double> best;
    for (int round = 0; round <= sizes.rounds; ++round) {
      for (const bool tiled : {true, false}) {
        std::vector<at::Tensor> in;
        for (const int64_t heads : {sizes.heads, sizes.kv_heads, sizes.kv_heads}) {
          in.push_back(at::randn({1, length, heads, sizes.features}, at::make_generator<at::CPUGeneratorImpl>(1)).to(sizes.dtype).requires_grad_());
        }
        const auto start = std::chrono::steady_clock::now();
        const at::Tensor out = tiled ? core(in[0], in[1], in[2], std::nullopt, ids) : nn::masked_attention(in[0], in[1], in[2], visible);
        out.backward(at::ones_like(out));
        const double time = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        const auto [found, is_new] = best.emplace(tiled ? "tiles" : "mask", time);
        if (!is_new) found->second = std::min(found->second, time);
      }
    }
    std::printf("S %lld in %lld documents, one device: tiles %.1f ms, mask %.1f ms, %.2f times\n", static_cast<long long>(length),
                static_cast<long long>(documents), best["tiles"] * 1e3, best["mask"] * 1e3, best["mask"] / best["tiles"]);
  }
}

void run(const Sizes& sizes) {
  const std::vector<std::pair<std::string, ContextParallelOptions>> methods{{"ring", {}},
                                                                            {"ring, no overlap", {.overlap = false}},
                                                                            {"all_gather", {.method = ContextMethod::AllGather}},
                                                                            {"ulysses", {.method = ContextMethod::Ulysses}}};
  comm::run_ranks(sizes.ranks,
                  [&](comm::World& world) {
                    std::map<std::string, double> best;
                    const auto note = [&](const std::string& name, double time) {
                      const auto [found, is_new] = best.emplace(name, time);
                      if (!is_new) found->second = std::min(found->second, time);
                    };
                    const SequenceCut cut = SequenceCut::head_tail(sizes.length, sizes.ranks);
                    for (int round = 0; round <= sizes.rounds; ++round) {  // the first warms up
                      OneCore alone;
                      const double one = seconds(alone, sizes, sizes.length, world.group());
                      if (round > 0) note("one device", one);
                      for (const auto& [name, options] : methods) {
                        OneCore model;
                        const auto context = context_parallel(model, world.group(), options, "core");
                        context->set_cut(cut);
                        const double time = seconds(model, sizes, cut.columns(world.rank()), world.group());
                        if (round > 0) note(name, time);
                      }
                    }
                    if (world.rank() != 0) return;
                    const double one = best.at("one device");
                    std::printf("S %lld, %d ranks, %lld heads, %lld of keys, %s\n", static_cast<long long>(sizes.length), sizes.ranks,
                                static_cast<long long>(sizes.heads), static_cast<long long>(sizes.kv_heads), c10::toString(sizes.dtype));
                    for (const auto& [name, time] : best) {
                      const double ranks = name == "one device" ? 1 : sizes.ranks;
                      std::printf("%-18s %9.1f ms   rate_over_one %.3f\n", name.c_str(), time * 1e3, one / (ranks * time));
                    }
                  },
                  {.timeout = std::chrono::minutes(10)});
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::Sizes sizes;
  if (argc > 1) sizes.length = std::stoll(argv[1]);
  if (argc > 2) sizes.ranks = std::stoi(argv[2]);
  if (argc > 3) sizes.heads = std::stoll(argv[3]);
  if (argc > 4) sizes.kv_heads = std::stoll(argv[4]);
  if (argc > 5) sizes.rounds = std::stoi(argv[5]);
  if (argc > 6 && std::string(argv[6]) == "bf16") sizes.dtype = at::kBFloat16;
  tessera::run(sizes);
  tessera::run_packed(sizes);
}
