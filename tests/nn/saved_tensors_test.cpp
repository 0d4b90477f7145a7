#include "tessera/nn/saved_tensors.h"

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "tessera/nn/operators.h"

namespace tessera::nn {
namespace {

/// Keeps copies of what it is asked to save, and counts.
struct Copies : SavedTensorHooks {
  struct Copy : SavedTensor {
    Copy(Copies& hooks, at::Tensor tensor) : hooks(hooks), tensor(std::move(tensor)) {}
    ~Copy() override { --hooks.alive; }
    at::Tensor unpack() override {
      ++hooks.unpacked;
      return tensor.clone();
    }
    Copies& hooks;
    at::Tensor tensor;
  };
  std::unique_ptr<SavedTensor> pack(const at::Tensor& tensor) override {
    EXPECT_FALSE(tensor.requires_grad());
    if (tensor.numel() < smallest) return nullptr;
    ++packed, ++alive;
    return std::make_unique<Copy>(*this, tensor.clone());
  }
  int64_t smallest = 0;
  int packed = 0, unpacked = 0, alive = 0;
};

at::Tensor ramp(int64_t n) { return at::arange(1, n + 1, at::kFloat).requires_grad_(); }

TEST(SavedTensors, PassTheHooksAndComeBack) {
  const auto hooks = std::make_shared<Copies>();
  at::Tensor x = ramp(3);
  at::Tensor loss;
  {
    SavedTensorScope scope(hooks);
    loss = (x * x).exp().sum();  // saves x twice, and the result of exp
  }
  EXPECT_EQ(hooks->packed, 3);
  EXPECT_EQ(hooks->alive, 3);
  const at::Tensor outside = (x * x).sum();
  EXPECT_EQ(hooks->packed, 3) << "no scope, no hooks";
  loss.backward();
  EXPECT_EQ(hooks->unpacked, 3);
  EXPECT_EQ(hooks->alive, 0) << "what backward has used is let go";
  EXPECT_TRUE(at::allclose(x.grad(), 2 * x.detach() * (x * x).detach().exp()));
}

TEST(SavedTensors, TheInnermostScopeThatTakesATensorHasIt) {
  const auto outer = std::make_shared<Copies>(), inner = std::make_shared<Copies>();
  inner->smallest = 3;
  at::Tensor big = ramp(4), small = ramp(2), none = ramp(1);
  outer->smallest = 2;
  SavedTensorScope out(outer);
  at::Tensor loss;
  {
    SavedTensorScope in(inner);
    loss = (big * big).sum() + (small * small).sum() + (none * none).sum();
    const auto saved = save(big.detach());
    EXPECT_TRUE(at::equal(saved->unpack(), big.detach()));
  }
  EXPECT_EQ(inner->packed, 3);
  EXPECT_EQ(outer->packed, 2);
  loss.backward();
  for (const auto& x : {big, small, none}) EXPECT_TRUE(at::equal(x.grad(), 2 * x.detach()));
}

TEST(SavedTensors, AreThoseOfTheThread) {
  const auto hooks = std::make_shared<Copies>();
  SavedTensorScope scope(hooks);
  std::thread([] { (ramp(3) * ramp(3)).sum().backward(); }).join();
  EXPECT_EQ(hooks->packed, 0);
}

TEST(SavedTensors, AChangeInPlaceIsRefused) {
  const auto hooks = std::make_shared<Copies>();
  hooks->smallest = 100;  // takes nothing
  at::Tensor x = ramp(3);
  at::Tensor y = x * 2, loss;
  std::unique_ptr<SavedTensor> saved;
  {
    SavedTensorScope scope(hooks);
    loss = (y * y).sum();
    saved = save(y);
  }
  y.detach().add_(1);
  EXPECT_THROW(saved->unpack(), ConfigError);
  EXPECT_THROW(loss.backward(), ConfigError);
}

TEST(SavedTensors, AGraphThatIsKeptAsksAgain) {
  const auto hooks = std::make_shared<Copies>();
  at::Tensor x = ramp(2);
  at::Tensor loss;
  {
    SavedTensorScope scope(hooks);
    loss = (x * x).sum();
  }
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_EQ(hooks->unpacked, 4);
  EXPECT_TRUE(at::equal(x.grad(), 4 * x.detach()));
}

TEST(SavedTensors, SecondDerivativesFollowTheOriginalGraph) {
  const auto hooks = std::make_shared<Copies>();
  at::Tensor x = ramp(2);
  SavedTensorScope scope(hooks);
  const at::Tensor y = x * x;
  const at::Tensor loss = (y * y).sum();  // x^4
  const at::Tensor first = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true).at(0);
  first.sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), 12 * x.detach() * x.detach()));
}

struct Names : OperatorHooks {
  void call(OperatorCall& operation) override {
    names.push_back(operation.name());
    at::ones({2}).add_(1);  // the hook's own operators do not come back to it
    operation.run();
  }
  std::vector<std::string> names;
};

TEST(Operators, PassBelowAutograd) {
  const auto names = std::make_shared<Names>();
  const at::Tensor x = at::ones({2, 3}).requires_grad_(), w = at::ones({4, 3}).requires_grad_();
  at::Tensor y;
  {
    OperatorScope scope(names);
    y = at::linear(x, w);
  }
  EXPECT_THAT(names->names, ::testing::Contains("aten::mm"));
  EXPECT_THAT(names->names, ::testing::Not(::testing::Contains("aten::ones")));
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2, 3}, 4.0)));
  const auto seen = names->names.size();
  at::linear(x, w);
  EXPECT_EQ(names->names.size(), seen);
}

TEST(Operators, FlopsThatAreRunAgainAreCountedApart) {
  const auto counter = std::make_shared<FlopCounter>();
  const OperatorScope scope(counter);
  const at::Tensor a = at::ones({2, 3}), b = at::ones({3, 5});
  at::mm(a, b);
  EXPECT_EQ(counter->recomputed_flops(), 0);
  {
    const RecomputingScope again;
    at::mm(a, b);
  }
  at::mm(a, b);
  EXPECT_EQ(counter->recomputed_flops(), 2 * 2 * 3 * 5);
  EXPECT_EQ(counter->flops(), 3 * 2 * 2 * 3 * 5);
}

TEST(Operators, FlopsOfProductsForwardAndBackward) {
  const auto counter = std::make_shared<FlopCounter>();
  const at::Tensor x = at::ones({5, 3}).requires_grad_(), w = at::ones({4, 3}).requires_grad_(), b = at::ones({4}).requires_grad_();
  OperatorScope scope(counter);
  const at::Tensor y = at::linear(x, w, b);
  EXPECT_EQ(counter->flops(), 2 * 5 * 3 * 4);
  y.sum().backward();
  EXPECT_EQ(counter->flops(), 3 * 2 * 5 * 3 * 4);
  const at::Tensor q = at::ones({2, 3, 4, 8}), k = at::ones({2, 3, 6, 8});
  const double before = counter->flops();
  at::bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2));
  EXPECT_EQ(counter->flops() - before, 2 * 6 * 4 * 6 * 8);
  at::_scaled_dot_product_flash_attention_for_cpu(q, k, k);
  EXPECT_EQ(counter->flops() - before, 3 * 2 * 6 * 4 * 6 * 8);
}

}  // namespace
}  // namespace tessera::nn
