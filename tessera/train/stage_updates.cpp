#include "tessera/train/stage_updates.h"

#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/nn/sharing.h"
#include "tessera/optim/clip.h"

namespace tessera {

void StageUpdates::met() {
  const at::NoGradGuard no_grad;
  nn::sum_terms(run_.layers, run_.updated, run_.cut);
  if (run_.tied) run_.tied->start_sum();
}

void StageUpdates::update(double lr) {
  const at::NoGradGuard no_grad;
  if (run_.tied) run_.tied->finish_sum();
  const at::Tensor square = optim::global_norm({optim::NormGroup{.parameters = nn::counted_once(run_.updated), .reduce = {}}}).square();
  squares_ = squares_.defined() ? squares_ + square : square;
  ++updates_;
  run_.optimizer->step(lr);
}

at::Tensor StageUpdates::norm(at::Device device) {
  invariant(updates_ > 0, "a step without an update");
  const at::NoGradGuard no_grad;
  const comm::CallSite site("norm");
  const at::Tensor sum = std::exchange(squares_, {}).to(device);
  if (run_.elements.size() > 1) comm::all_reduce(run_.elements, sum);
  return sum.div(static_cast<double>(std::exchange(updates_, 0))).sqrt();
}

}  // namespace tessera
