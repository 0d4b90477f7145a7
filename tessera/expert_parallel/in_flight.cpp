#include "tessera/expert_parallel/in_flight.h"

#include <numeric>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/autograd_function.h"
#include "tessera/core/once_differentiable.h"

// Going forward a tensor that is being written goes from one node to the other, and nobody else reads it. Going backward autograd wants a gradient of that
// tensor's shape, and what is on its way has another: the end hands on what it was given, and the message keeps what comes.

namespace tessera::experts {
namespace {

struct Message : torch::CustomClassHolder {
  comm::Group group;
  std::vector<int64_t> out, in;
  std::string site;  ///< of the module that asked: backward's records name it, too
  comm::Pending pending;
  at::Tensor gradient;  ///< of x, on its way

  at::Tensor send(const at::Tensor& x, const std::vector<int64_t>& coming, const std::vector<int64_t>& going) {
    const comm::CallSite from(site);
    const at::Tensor y = at::empty({std::accumulate(coming.begin(), coming.end(), int64_t{0}), x.size(1)}, x.options());
    pending = comm::all_to_all_async(group, y, x, coming, going);
    return y;
  }
  void wait() {
    const comm::CallSite from(site);
    std::exchange(pending, {}).wait();  // which holds both ends' rows
  }
};

using Held = c10::intrusive_ptr<Message>;

void keep(torch::autograd::AutogradContext* context, const Held& message) { context->saved_data["message"] = c10::IValue::make_capsule(message); }

Held kept(torch::autograd::AutogradContext* context) { return c10::static_intrusive_pointer_cast<Message>(context->saved_data["message"].toCapsule()); }

constexpr const char* kWayOut = "call the experts without shared ones beside them";

struct Begin : AutogradFunction<Begin> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Held& message) {
    keep(context, message);
    return message->send(x, message->out, message->in);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const Held message = kept(context);
    message->wait();
    return once_differentiable("an exchange of rows", kWayOut, grads, {std::exchange(message->gradient, {}), at::Tensor()});
  }
};

struct End : AutogradFunction<End> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& rows, const Held& message) {
    keep(context, message);
    message->wait();
    return rows.view_as(rows);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const Held message = kept(context);
    message->gradient = message->send(grads[0], message->in, message->out);
    return once_differentiable("an exchange of rows", kWayOut, grads, {grads[0], at::Tensor()});
  }
};

}  // namespace

InFlight begin_all_to_all(const comm::Group& group, const at::Tensor& x, const std::vector<int64_t>& out, const std::vector<int64_t>& in) {
  if (x.requires_grad()) group.in_backward().by_graphs = true;
  auto message = c10::make_intrusive<Message>();
  message->group = group;
  message->out = out;
  message->in = in;
  message->site = comm::CallSite::current();
  at::Tensor rows = Begin::apply(x, message);
  return {std::move(rows), std::move(message)};
}

at::Tensor end_all_to_all(const InFlight& coming) { return End::apply(coming.rows, c10::static_intrusive_pointer_cast<Message>(coming.message)); }

}  // namespace tessera::experts
