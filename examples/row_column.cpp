// One product y = x W^T on several ranks, in its two ways, each with what moves:
//   tessera run --nproc_per_node 2 path/to/row_column      (alone, the one rank has everything, and nothing can go wrong)
// Column-wise, a rank has some rows of W, needs all of x, and computes some columns of y: they are gathered. Row-wise, a rank has some columns of W, takes the
// matching part of x, and computes a term of y: the terms are added up. A non-linear function may follow at once in the first case, only after the sum in the
// second: max(0, a) + max(0, b) is not max(0, a + b).
#include <cstdio>
#include <exception>

#include <ATen/ATen.h>
#include <torch/utils.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

namespace {

long long number(int64_t value) { return value; }

void show(const char* what, const at::Tensor& y, const at::Tensor& expected) {
  std::printf("%-44s differs from one device by %.1e\n", what, (y - expected).abs().max().item<double>());
}

void multiply() {
  auto world = tessera::comm::World::from_environment();
  const auto group = world.group();
  const int64_t tokens = 4, in = 6, out = 8;
  torch::manual_seed(0);  // the same everywhere
  const at::Tensor x = at::randn({tokens, in}), w = at::randn({out, in});
  const at::Tensor whole = x.mm(w.t());
  const auto part = [&](int64_t size) { return tessera::chunk(size, world.size(), world.rank()); };

  // Column-wise: x is everywhere; rows of W; gather the columns of y.
  const auto [row, rows] = part(out);
  const at::Tensor columns = x.mm(w.narrow(0, row, rows).t());
  std::vector<at::Tensor> gathered;
  for (int rank = 0; rank < world.size(); ++rank) gathered.push_back(at::empty({tokens, tessera::chunk(out, world.size(), rank).second}));
  tessera::comm::all_gather_uneven(group, gathered, columns);

  // Row-wise: scatter the columns of x (each rank takes its own); columns of W; add the terms up.
  const auto [column, size] = part(in);
  const at::Tensor term = x.narrow(1, column, size).mm(w.narrow(1, column, size).t());
  const at::Tensor sum = term.clone();
  tessera::comm::all_reduce(group, sum);
  const at::Tensor bent = term.relu();
  tessera::comm::all_reduce(group, bent);

  if (world.rank() != 0) return;
  std::printf("%d rank%s; y = x W^T, x [%lld, %lld], W [%lld, %lld]\n\n", world.size(), world.size() == 1 ? "" : "s", number(tokens), number(in), number(out),
              number(in));
  std::printf("column-wise: rank 0 has all of x and rows 0:%lld of W, computes columns 0:%lld of y [%lld, %lld]; all_gather of its %lld elements\n",
              number(rows), number(rows), number(tokens), number(out), number(tokens * out));
  show("column-wise, gathered", at::cat(gathered, 1), whole);
  show("column-wise, relu of the parts, gathered", at::cat(gathered, 1).relu(), whole.relu());
  std::printf("\nrow-wise: rank 0 has columns 0:%lld of x and of W, computes a term of all of y; all_reduce of its %lld elements\n", number(size),
              number(tokens * out));
  show("row-wise, added up", sum, whole);
  show("row-wise, relu after the sum", sum.relu(), whole.relu());
  show("row-wise, relu before the sum (wrong)", bent, whole.relu());
}

}  // namespace

int main() {
  try {
    multiply();
    return 0;
  } catch (const tessera::ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
