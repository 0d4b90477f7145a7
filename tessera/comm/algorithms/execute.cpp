#include "tessera/comm/algorithms/execute.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include "tessera/comm/engine.h"
#include "tessera/comm/tags.h"
#include "tessera/core/error.h"

// All of a step is posted before any of it is waited for, receives first: with what each sends being what its partner receives, which the simulation proves, no
// two ranks can wait for each other, however large the messages are.

namespace tessera::comm {
namespace {

void reduce_into(const at::Tensor& to, const at::Tensor& a, const at::Tensor& b, Op op) {
  auto out = to;
  switch (op) {
    case Op::Sum:
      at::add_out(out, a, b);
      return;
    case Op::Product:
      at::mul_out(out, a, b);
      return;
    case Op::Min:
      at::minimum_out(out, a, b);
      return;
    case Op::Max:
      at::maximum_out(out, a, b);
      return;
  }
  throw InternalError("internal error: unknown reduction");
}

// The tensors that a program's regions lie in.
class Memory {
 public:
  Memory(const Program& program, const Call& call, const at::Tensor& scratch) : call_(call), scratch_(scratch) {
    if (program.tokens) token_ = at::empty({2}, at::device(at::kCPU).dtype(at::kByte));
  }

  at::Tensor at(const Region& region) const { return whole(region).view(-1).narrow(0, region.begin, region.size); }
  // A barrier's messages mean nothing; those that come must not meet those that go.
  at::Tensor message(const Region& region, bool receives) const { return token_.defined() ? token_.narrow(0, receives, 1) : at(region); }

 private:
  const at::Tensor& whole(const Region& region) const {
    if (region.place == Region::Place::Scratch) return scratch_;
    return region.place == Region::Place::Input ? call_.inputs[region.index] : call_.outputs[region.index];
  }

  const Call& call_;
  const at::Tensor& scratch_;
  at::Tensor token_;
};

void move(const Memory& memory, const Move& move, const Call& call) {
  const auto to = memory.at(move.to), from = memory.at(move.from);
  if (move.reduce) {
    const auto with = memory.at(move.with);
    reduce_into(to, move.from_first ? from : with, move.from_first ? with : from, call.reduction.value());
  } else if (to.data_ptr() != from.data_ptr()) {  // callers may gather in place
    to.copy_(from);
  }
}

}  // namespace

void execute(const Program& program, const Call& call, const at::Tensor& scratch, Engine& engine) {
  const Memory memory(program, call, scratch);
  for (const auto& step : program.steps) {
    for (const auto& pack : step.pack) move(memory, pack, call);
    std::vector<Work> posted;
    for (const auto& [peer, region] : step.receives) {
      posted.push_back(engine.start({.op = Operation::Recv, .outputs = {memory.message(region, true)}, .peer = peer, .tag = kPlanTag, .async = false}));
    }
    for (const auto& [peer, region] : step.sends) {
      posted.push_back(engine.start({.op = Operation::Send, .inputs = {memory.message(region, false)}, .peer = peer, .tag = kPlanTag, .async = false}));
    }
    for (const auto& work : posted) work->wait();
    for (const auto& unpack : step.unpack) move(memory, unpack, call);
  }
  for (const auto& own : program.finish) move(memory, own, call);
}

}  // namespace tessera::comm
