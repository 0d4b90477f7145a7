#include "tessera/comm/differentiable.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using differentiable::Gradient;

constexpr double kTolerance = 1e-12;  // double precision; at most eight terms in another order

// A collective and the same thing in one process. Each rank's x has shape(rank).
struct Case {
  std::function<std::vector<int64_t>(int rank)> shape;
  std::function<at::Tensor(const Group&, const at::Tensor& x)> collective;
  std::function<Tensors(const Tensors& xs)> plain;  // all ranks' y from all ranks' x
  bool replicated = false;                          // all ranks compute the same loss from the same y
  bool twice = true;                                // check gradients of gradients as well
};

at::Tensor example(int rank, at::IntArrayRef shape) { return (at::arange(c10::multiply_integers(shape), at::kDouble).reshape(shape) * 0.37 + rank).sin(); }

at::Tensor loss_of(const at::Tensor& y, int rank) { return (y.pow(3) * example(20 + rank, y.sizes())).sum(); }

at::Tensor gradient_of(const at::Tensor& loss, const at::Tensor& x, bool create_graph = false) {
  return torch::autograd::grad({loss}, {x}, {}, true, create_graph)[0];
}

// Everything the plain computation says: outputs, gradients, and gradients of the squared gradients.
struct Expected {
  Tensors y, gradient, second;
};

Expected expected_of(const Case& test, int n) {
  Tensors xs;
  for (int rank = 0; rank < n; ++rank) xs.push_back(example(rank, test.shape(rank)).requires_grad_());
  Expected expected;
  expected.y = test.plain(xs);
  at::Tensor loss = loss_of(expected.y[0], 0);
  for (int rank = 1; rank < n && !test.replicated; ++rank) loss = loss + loss_of(expected.y[rank], rank);
  expected.gradient = torch::autograd::grad({loss}, xs, {}, true, true);
  auto squares = expected.gradient[0].square().sum();
  for (int rank = 1; rank < n; ++rank) squares = squares + expected.gradient[rank].square().sum();
  expected.second = torch::autograd::grad({squares}, xs, {}, true, false, true);
  return expected;
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, const char* what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (actual.numel() == 0) return;
  EXPECT_LE((actual - expected).abs().max().item<double>(), kTolerance * std::max(1.0, expected.abs().max().item<double>())) << what;
}

void check(const std::vector<Case>& cases, int n) {
  std::vector<Expected> expected;
  for (const auto& test : cases) expected.push_back(expected_of(test, n));
  run_ranks(n, [&](World& world) {
    const int rank = world.rank();
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "case " << i << ", rank " << rank);
      const auto& test = cases[i];
      const bool twice = test.twice && n <= 3;  // more ranks prove nothing new there
      const auto x = example(rank, test.shape(rank)).requires_grad_();
      const auto y = test.collective(world.group(), x);
      expect_close(y, expected[i].y[rank], "output");
      const auto gradient = gradient_of(loss_of(y, test.replicated ? 0 : rank), x, twice);
      expect_close(gradient, expected[i].gradient[rank], "gradient");
      if (twice) expect_close(gradient_of(gradient.square().sum(), x), expected[i].second[rank], "gradient of the squared gradient");
    }
  });
}

class Differentiable : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Differentiable, ::testing::Values(1, 2, 3, 5, 8));

std::function<std::vector<int64_t>(int)> same(std::vector<int64_t> shape) {
  return [shape](int) { return shape; };
}

at::Tensor sum(const Tensors& xs) { return at::stack(xs).sum(0); }

Tensors parts(const at::Tensor& whole, int n, int64_t dim) {
  Tensors result;
  for (int rank = 0; rank < n; ++rank) {
    const auto [begin, size] = chunk(whole.size(dim), n, rank);
    result.push_back(whole.narrow(dim, begin, size));
  }
  return result;
}

TEST_P(Differentiable, AllReduceWhereRanksGoOnDifferently) {
  check({{.shape = same({3, 2}),
          .collective = [](const Group& group, const at::Tensor& x) { return differentiable::all_reduce(group, x, Gradient::Partial); },
          .plain = [](const Tensors& xs) { return Tensors(xs.size(), sum(xs)); }}},
        GetParam());
}

TEST_P(Differentiable, AllReduceWhereAllComputeTheSameLoss) {
  check({{.shape = same({3, 2}),
          .collective = [](const Group& group, const at::Tensor& x) { return differentiable::all_reduce(group, x); },
          .plain = [](const Tensors& xs) { return Tensors(xs.size(), sum(xs)); },
          .replicated = true,
          .twice = false}},
        GetParam());
}

// x is the same everywhere and each rank uses it its own way: the gradient of the one x is the sum of the ranks'.
TEST_P(Differentiable, CopyToGroupSumsGradients) {
  const int n = GetParam();
  const auto whole = example(0, {4}).requires_grad_();
  auto loss = loss_of(whole, 0);
  for (int rank = 1; rank < n; ++rank) loss = loss + loss_of(whole, rank);
  const auto expected = gradient_of(loss, whole);
  run_ranks(n, [&](World& world) {
    const auto x = example(0, {4}).requires_grad_();
    const auto y = differentiable::copy_to_group(world.group(), x);
    expect_close(y, x, "output");
    expect_close(gradient_of(loss_of(y, world.rank()), x), expected, "gradient");
  });
}

TEST_P(Differentiable, AllGatherAlongEveryDimension) {
  std::vector<Case> cases;
  for (const int64_t dim : {0, 1, -1}) {
    cases.push_back({.shape = same({2, 3, 1}),
                     .collective = [dim](const Group& group, const at::Tensor& x) { return differentiable::all_gather(group, x, dim); },
                     .plain = [dim](const Tensors& xs) { return Tensors(xs.size(), at::cat(xs, dim)); }});
  }
  check(cases, GetParam());
}

TEST_P(Differentiable, AllGatherOfUnevenParts) {
  const int n = GetParam();
  std::vector<Case> cases;
  for (const int64_t dim : {0, 1}) {
    for (const int64_t total : {7, 3}) {  // of eight ranks some hold nothing
      const auto shape = [=](int rank) {
        const auto size = chunk(total, n, rank).second;
        return dim == 0 ? std::vector<int64_t>{size, 2} : std::vector<int64_t>{2, size};
      };
      cases.push_back({.shape = shape,
                       .collective = [=](const Group& group, const at::Tensor& x) { return differentiable::all_gather(group, x, dim, total); },
                       .plain = [=](const Tensors& xs) { return Tensors(xs.size(), at::cat(xs, dim)); }});
    }
  }
  check(cases, n);
}

TEST_P(Differentiable, AllGatherWhereAllComputeTheSameLoss) {
  check({{.shape = same({2, 3}),
          .collective = [](const Group& group, const at::Tensor& x) { return differentiable::all_gather(group, x, 1, -1, Gradient::Replicated); },
          .plain = [](const Tensors& xs) { return Tensors(xs.size(), at::cat(xs, 1)); },
          .replicated = true,
          .twice = false}},
        GetParam());
}

TEST_P(Differentiable, ReduceScatterEvenAndUneven) {
  const int n = GetParam();
  std::vector<Case> cases;
  for (const int64_t dim : {0, 1}) {
    for (const int64_t rows : {int64_t{2} * n, int64_t{7}, int64_t{0}}) {
      cases.push_back({.shape = same(dim == 0 ? std::vector<int64_t>{rows, 2} : std::vector<int64_t>{2, rows}),
                       .collective = [=](const Group& group, const at::Tensor& x) { return differentiable::reduce_scatter(group, x, dim); },
                       .plain = [=](const Tensors& xs) { return parts(sum(xs), n, dim); }});
    }
  }
  check(cases, n);
}

// x is the same everywhere; each rank goes on with its part.
TEST_P(Differentiable, SplitGathersGradients) {
  const int n = GetParam();
  for (const int64_t dim : {0, 1}) {
    const auto whole = example(0, {7, 9}).requires_grad_();
    const auto ys = parts(whole, n, dim);
    auto loss = loss_of(ys[0], 0);
    for (int rank = 1; rank < n; ++rank) loss = loss + loss_of(ys[rank], rank);
    const auto expected = gradient_of(loss, whole);
    run_ranks(n, [&](World& world) {
      const auto x = example(0, {7, 9}).requires_grad_();
      const auto y = differentiable::split(world.group(), x, dim);
      expect_close(y, ys[world.rank()], "output");
      expect_close(gradient_of(loss_of(y, world.rank()), x), expected, "gradient");
    });
  }
}

TEST_P(Differentiable, AllToAllEvenAndUneven) {
  const int n = GetParam();
  const auto transposed = [n](const Tensors& xs, const std::function<int64_t(int, int)>& rows) {
    Tensors ys;
    for (int to = 0; to < n; ++to) {
      Tensors received;
      for (int from = 0; from < n; ++from) {
        int64_t begin = 0;
        for (int before = 0; before < to; ++before) begin += rows(from, before);
        received.push_back(xs[from].narrow(0, begin, rows(from, to)));
      }
      ys.push_back(at::cat(received));
    }
    return ys;
  };
  const auto rows = [](int from, int to) -> int64_t { return (2 * from + to) % 3; };
  const auto sent_by = [n, rows](int rank) {
    int64_t sent = 0;
    for (int to = 0; to < n; ++to) sent += rows(rank, to);
    return std::vector<int64_t>{sent, 2};
  };
  const auto exchange = [n, rows](const Group& group, const at::Tensor& x) {
    std::vector<int64_t> in, out;
    for (int other = 0; other < n; ++other) in.push_back(rows(group.rank(), other)), out.push_back(rows(other, group.rank()));
    return differentiable::all_to_all(group, x, out, in);
  };
  check({{.shape = same({2 * n, 3}),
          .collective = [](const Group& group, const at::Tensor& x) { return differentiable::all_to_all(group, x); },
          .plain = [=](const Tensors& xs) { return transposed(xs, [](int, int) { return 2; }); }},
         {.shape = sent_by, .collective = exchange, .plain = [=](const Tensors& xs) { return transposed(xs, rows); }}},
        n);
}

/// Rank 0 deals its rows unevenly; the others, which say nothing of theirs, equally.
TEST_P(Differentiable, AllToAllOfRanksThatSayOnlyWhatComes) {
  const int n = GetParam();
  if (n == 1) return;  // nothing to deal
  run_ranks(n, [&](World& world) {
    const bool first = world.rank() == 0;
    std::vector<int64_t> in, out(static_cast<size_t>(n), 2);
    for (int other = 0; first && other < n; ++other) in.push_back(1 + other);
    out[0] = 1 + world.rank();
    const int64_t rows = first ? std::accumulate(in.begin(), in.end(), int64_t{0}) : 2 * n;
    const at::Tensor x = at::full({rows, 3}, static_cast<double>(world.rank())).requires_grad_();
    const at::Tensor y = differentiable::all_to_all(world.group(), x, out, in);
    EXPECT_EQ(y.size(0), std::accumulate(out.begin(), out.end(), int64_t{0}));
    (y * (10.0 + world.rank())).sum().backward();
    for (int64_t row = 0, to = 0, left = first ? in[0] : 2; row < rows; ++row, --left) {
      while (left == 0) left = first ? in[static_cast<size_t>(++to)] : (++to, 2);
      EXPECT_EQ(x.grad()[row][0].item<double>(), 10.0 + static_cast<double>(to)) << "row " << row << " of rank " << world.rank();
    }
  });
}

TEST_P(Differentiable, BroadcastGatherScatter) {
  const int n = GetParam();
  std::vector<Case> cases;
  for (const int root : {0, n - 1}) {
    cases.push_back({.shape = same({3, 2}),
                     .collective = [=](const Group& group, const at::Tensor& x) { return differentiable::broadcast(group, x, root); },
                     .plain =
                         [=](const Tensors& xs) {
                           Tensors ys;
                           for (const auto& x : xs) ys.push_back(xs[root] + 0 * x);
                           return ys;
                         }});
    cases.push_back({.shape = same({3, 2}),
                     .collective = [=](const Group& group, const at::Tensor& x) { return differentiable::gather(group, x, root); },
                     .plain =
                         [=](const Tensors& xs) {
                           Tensors ys(n, at::empty({0, 2}, at::kDouble));
                           ys[root] = at::cat(xs);
                           return ys;
                         }});
    cases.push_back({.shape = same({2 * n, 2}),
                     .collective = [=](const Group& group, const at::Tensor& x) { return differentiable::scatter(group, x, root); },
                     .plain =
                         [=](const Tensors& xs) {
                           Tensors ys;
                           for (int rank = 0; rank < n; ++rank) ys.push_back(xs[root].narrow(0, 2 * rank, 2) + 0 * xs[rank].sum());
                           return ys;
                         }});
  }
  check(cases, n);
}

TEST_P(Differentiable, BroadcastWhereAllComputeTheSameLoss) {
  run_ranks(GetParam(), [](World& world) {
    const auto x = example(world.rank(), {4}).requires_grad_();
    const auto gradient = gradient_of(loss_of(differentiable::broadcast(world.group(), x, 0, Gradient::Replicated), 0), x);
    const auto root = example(0, {4}).requires_grad_();
    expect_close(gradient, world.rank() == 0 ? gradient_of(loss_of(root, 0), root) : at::zeros({4}, at::kDouble), "gradient");
  });
}

TEST_P(Differentiable, BarrierIsTheIdentity) {
  check({{.shape = same({3}),
          .collective = [](const Group& group, const at::Tensor& x) { return differentiable::barrier(group, x); },
          .plain = [](const Tensors& xs) { return xs; },
          .twice = false}},
        GetParam());
}

// A chain: rank r doubles what it gets and passes it on; the last rank's loss reaches rank 0's x.
TEST_P(Differentiable, SendAndRecvThroughAChain) {
  const int n = GetParam();
  run_ranks(n, [n](World& world) {
    const auto group = world.group();
    const int rank = world.rank();
    const auto x = example(0, {3, 2}).requires_grad_();
    auto y = (rank == 0 ? x : differentiable::recv(group, at::empty({3, 2}, at::kDouble), rank - 1, 5)) * 2;
    const auto loss = rank == n - 1 ? loss_of(y, 0) : differentiable::send(group, y, rank + 1, 5);
    loss.backward();
    if (rank == 0) {
      const auto whole = example(0, {3, 2}).requires_grad_();
      expect_close(x.grad(), gradient_of(loss_of(whole * std::pow(2.0, n), 0), whole), "gradient");
    }
  });
}

// The receiver cannot know what the sender wants, and sends its gradient: none is left over for the next message.
TEST(DifferentiableMessages, FromASenderWhoWantsNoGradientAreAnsweredToo) {
  for (const auto dtype : {at::kFloat, at::kComplexFloat}) {
    run_ranks(2, [dtype](World& world) {
      const auto group = world.group();
      for (int step = 0; step < 3; ++step) {
        if (world.rank() == 1) {
          at::real(differentiable::recv(group, at::empty({3}, dtype), 0, 7) * (10.0 * (step + 1))).sum().backward();
          continue;
        }
        const auto x = at::ones({3}, dtype).requires_grad_(step > 0);
        at::real(differentiable::send(group, x, 1, 7)).backward();
        if (step > 0) EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 10.0 * (step + 1), dtype))) << x.grad();
      }
    });
  }
}

TEST(DifferentiableMessages, OfIntegersAndWithoutGraphsAreNot) {
  run_ranks(2, [](World& world) {
    const auto group = world.group();
    for (const bool records : {true, false}) {
      const at::AutoGradMode mode(records);
      const auto x = at::ones({3}, records ? at::kLong : at::kFloat);
      const auto y = world.rank() == 0 ? differentiable::send(group, x, 1) : differentiable::recv(group, x, 0);
      EXPECT_FALSE(y.requires_grad());
    }
  });
}

/// The receiver's second pass would never come by here: silence would be a wrong number.
TEST(DifferentiableRefuses, ASecondDerivativeThroughAMessage) {
  run_ranks(2, [](World& world) {
    const auto group = world.group();
    const auto x = example(world.rank(), {3}).requires_grad_();
    if (world.rank() == 1) return (differentiable::recv(group, x, 0) * x).pow(2).sum().backward();
    const auto gradient = gradient_of(differentiable::send(group, x.square(), 1), x, /*create_graph=*/true);
    EXPECT_THAT([&] { gradient_of(gradient.square().sum(), x); },
                testing::ThrowsMessage<ConfigError>(testing::HasSubstr("send: its gradient was differentiated once more")));
  });
}

TEST(DifferentiableRefuses, PartsThatAreNotDealtByTheRule) {
  run_ranks(2, [](World& world) { EXPECT_THROW(differentiable::all_gather(world.group(), at::zeros({1 + world.rank(), 1}), 0, 3), InternalError); });
  run_ranks(2, [](World& world) { EXPECT_THROW(differentiable::scatter(world.group(), at::zeros({3})), InternalError); });
  run_ranks(2, [](World& world) { EXPECT_THROW(differentiable::all_gather(world.group(), at::zeros({2}), 1), InternalError); });
}

// What the header promises of traffic, held against the recorder on meta tensors.
TEST(DifferentiableTraffic, IsAsDocumented) {
  using Function = std::function<at::Tensor(const Group&, const at::Tensor&)>;
  using Ops = std::vector<std::pair<std::string, int64_t>>;  // op and elements of the whole
  const int n = 4;
  struct Row {
    const char* name;
    std::vector<int64_t> shape;
    Function function;
    Ops forward, backward;
  };
  namespace d = differentiable;
  const std::vector<Row> rows{
      {"copy_to_group", {8, 2}, [](auto& g, auto& x) { return d::copy_to_group(g, x); }, {}, {{"all_reduce", 16}}},
      {"all_reduce", {8, 2}, [](auto& g, auto& x) { return d::all_reduce(g, x); }, {{"all_reduce", 16}}, {}},
      {"all_reduce partial", {8, 2}, [](auto& g, auto& x) { return d::all_reduce(g, x, Gradient::Partial); }, {{"all_reduce", 16}}, {{"all_reduce", 16}}},
      {"all_gather", {8, 2}, [](auto& g, auto& x) { return d::all_gather(g, x, 1); }, {{"all_gather", 64}}, {{"reduce_scatter", 64}}},
      {"all_gather uneven", {2, 2}, [](auto& g, auto& x) { return d::all_gather(g, x, 0, 6); }, {{"all_gather", 16}}, {{"reduce_scatter", 16}}},
      {"all_gather replicated", {8, 2}, [](auto& g, auto& x) { return d::all_gather(g, x, 0, -1, Gradient::Replicated); }, {{"all_gather", 64}}, {}},
      {"reduce_scatter", {8, 2}, [](auto& g, auto& x) { return d::reduce_scatter(g, x); }, {{"reduce_scatter", 16}}, {{"all_gather", 16}}},
      {"split", {8, 2}, [](auto& g, auto& x) { return d::split(g, x); }, {}, {{"all_gather", 16}}},
      {"all_to_all", {8, 2}, [](auto& g, auto& x) { return d::all_to_all(g, x); }, {{"all_to_all", 16}}, {{"all_to_all", 16}}},
      {"broadcast", {8, 2}, [](auto& g, auto& x) { return d::broadcast(g, x); }, {{"broadcast", 16}}, {{"reduce", 16}}},
      {"gather", {8, 2}, [](auto& g, auto& x) { return d::gather(g, x); }, {{"gather", 64}}, {{"scatter", 64}}},
      {"scatter", {8, 2}, [](auto& g, auto& x) { return d::scatter(g, x); }, {{"scatter", 16}}, {{"gather", 16}}},
      {"send", {8, 2}, [](auto& g, auto& x) { return d::send(g, x, 1); }, {{"send", 16}}, {{"recv", 16}}},
      {"recv", {8, 2}, [](auto& g, auto& x) { return d::recv(g, x, 1); }, {{"recv", 16}}, {{"send", 16}}},
      {"barrier", {8, 2}, [](auto& g, auto& x) { return d::barrier(g, x); }, {{"barrier", 0}}, {{"barrier", 0}}},
  };
  for (const auto& row : rows) {
    const auto recorder = std::make_shared<Recorder>();
    const auto world = World::dry(n, 0, recorder);
    const auto ops = [&] {
      Ops seen;
      for (const auto& record : recorder->records()) {
        EXPECT_EQ(record.site, "layers.0.mlp") << row.name;
        seen.emplace_back(record.op, record.elements);
      }
      recorder->clear();
      return seen;
    };
    const auto x = at::empty(row.shape, at::device(at::kMeta)).requires_grad_();
    at::Tensor y;
    {
      const CallSite site("layers.0.mlp");
      y = row.function(world.group(), x);
    }
    EXPECT_EQ(ops(), row.forward) << row.name << " forward";
    y.sum().backward();  // outside of the scope: the node remembers where it came from
    EXPECT_EQ(ops(), row.backward) << row.name << " backward";
  }
}

}  // namespace
}  // namespace tessera::comm
