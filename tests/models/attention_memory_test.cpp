#include <cstdio>

#include <gtest/gtest.h>

#include "tessera/kernels/choice.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

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

  int64_t bytes = 0;  ///< queries, keys and values among them

 private:
  const MemoryTracker& tracker_;
  kernels::KernelChoice choice_;
};

/// Of what a block of LLaMA keeps between forward and backward, the part that its attention core keeps.
double share_of_attention(int64_t length, kernels::KernelChoice choice) {
  ModelConfig config = tiny_config("llama");
  config.dim = 256;
  config.heads = config.kv_heads.emplace(4);
  config.ffn_dim = 704;
  config.layers = 1;
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

TEST(AttentionMemory, OfTheFusedCoreIsAShareThatNoLengthChanges) {
  const double fused = share_of_attention(256, kernels::KernelChoice::Auto);
  for (const int64_t length : {256, 1024, 4096, 16384, 65536}) {
    const double now = share_of_attention(length, kernels::KernelChoice::Auto), unfused = share_of_attention(length, kernels::KernelChoice::Reference);
    std::printf("S %6lld: attention is %4.1f%% of what a block keeps, %4.1f%% where all scores are held\n", static_cast<long long>(length), 100 * now,
                100 * unfused);
    EXPECT_NEAR(now, fused, 0.02);
    if (length >= 4096) EXPECT_GT(unfused, 0.8);
  }
}

}  // namespace
}  // namespace tessera
