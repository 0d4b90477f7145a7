#include "tessera/comm/call_site.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/nn/attach.h"
#include "tessera/nn/linear.h"

namespace tessera::nn {
namespace {

using testing::ElementsAre;

std::string site() { return std::string(comm::CallSite::current()); }

/// Notes where a collective would come from, here and further in.
struct Noting : Interceptor {
  Values call(Module&, Values inputs, const Next& next) override {
    sites.push_back(site());
    kept = [next, inputs] { return next(inputs); };
    return next(std::move(inputs));
  }
  std::vector<std::string> sites;
  std::function<Values()> kept;
};

struct PairImpl : Module {
  PairImpl() : inner(2, 2) { register_module("inner", inner); }
  at::Tensor forward(const at::Tensor& x) {
    sites.push_back(site());
    return inner(x);
  }
  Linear inner;
  std::vector<std::string> sites;
};
TESSERA_MODULE(Pair);

TEST(CallSite, OfAnInterceptedCallIsTheModulesPath) {
  Pair pair;
  pair->set_path("layers.3");
  pair->inner->set_path("layers.3.inner");
  const auto x = at::ones({1, 2});
  const comm::CallSite outer("outer");
  pair(x);
  EXPECT_THAT(pair->sites, ElementsAre("outer")) << "nothing intercepts it";

  const auto noting = std::make_shared<Noting>();
  const auto attached = attach(*pair, noting);
  const auto inner = std::make_shared<Noting>();
  const auto attached_inside = attach(*pair->inner, inner);
  pair(x);
  EXPECT_EQ(pair->sites.back(), "layers.3");
  EXPECT_THAT(noting->sites, ElementsAre("layers.3"));
  EXPECT_THAT(inner->sites, ElementsAre("layers.3.inner"));
  EXPECT_EQ(site(), "outer");

  noting->kept();  // as recompute calls it again, later
  EXPECT_THAT(pair->sites, ElementsAre("outer", "layers.3", "layers.3"));
  noting->kept = nullptr;  // it holds the chain that holds it
}

TEST(CallSite, OfARootIsTheOneAround) {
  Linear root(2, 2);
  const auto noting = std::make_shared<Noting>();
  const auto attached = attach(*root, noting);
  const comm::CallSite outer("report");
  root(at::ones({1, 2}));
  EXPECT_THAT(noting->sites, ElementsAre("report"));
}

}  // namespace
}  // namespace tessera::nn
