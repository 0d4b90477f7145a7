#include "tessera/comm/decorators/algorithm.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/algorithms/execute.h"
#include "tessera/comm/backends/host_identity.h"
#include "tessera/comm/backends/work_queue.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/meeting/hosts.h"
#include "tessera/core/error.h"

// All plans of a group send under one tag, so their messages are told apart by order alone: one queue runs them one after the other, and a collective that
// stays with the engine waits for the last of them. A plan that failed may have messages under way that the next one would take for its own: from then on the
// group refuses plans, with the first cause. Programs depend on sizes and not on tensors, and are kept.

namespace tessera::comm {
namespace {

constexpr size_t kMostPrograms = 256;

class AlgorithmEngine : public DecoratedEngine {
 public:
  AlgorithmEngine(std::shared_ptr<const AlgorithmChoice> choice, std::vector<int> hosts, const GroupInfo& group, std::shared_ptr<Engine> inner)
      : DecoratedEngine(group, std::move(inner)), choice_(std::move(choice)), hosts_(std::move(hosts)) {
    const auto name = this->name();
    backend_ = name.substr(0, name.find('+'));  // what serves CPU tensors stands first
  }

  void abort() override {
    queue_.abort();
    DecoratedEngine::abort();
  }

  Work start(const Call& call) override {
    const auto plan = choice_->plan_for(call, group(), backend_, hosts_);
    if (plan) return run(*plan, call);
    if (last_ && !call.is_message()) last_->wait();  // the order of messages against collectives is the callers' to choose
    return inner()->start(call);
  }

 private:
  Work run(const MessagePlanRequest& plan, const Call& call) {
    const auto program = program_for(plan, call);
    at::Tensor scratch;
    if (program->scratch_elements > 0) scratch = at::empty({program->scratch_elements}, at::TensorOptions(call.dtype()));
    last_ = queue_.run([this, program, call, scratch] { execute_unless_failed(*program, call, scratch); }, call.async);
    return staged_work({{last_, [scratch] {}}});  // as long as the work lives, so that a dry run is true to the byte
  }

  // Only the queue's tasks come here, one after the other.
  void execute_unless_failed(const Program& program, const Call& call, const at::Tensor& scratch) {
    if (!failure_.empty()) throw CommError("an earlier collective of the group failed: " + failure_);
    try {
      execute(program, call, scratch, *inner());
    } catch (...) {
      failure_ = message_of(std::current_exception());
      throw;
    }
  }

  std::shared_ptr<const Program> program_for(const MessagePlanRequest& plan, const Call& call) {
    if (call.has_splits()) return std::make_shared<Program>(make_program(plan, group().rank, call));
    const auto key = fmt::format("{} {} {} {} {} {}", plan.op, plan.algorithm, plan.root, plan.segments, c10::multiply_integers(call.whole(group().size)),
                                 call.outputs.size());
    auto& known = programs_[key];
    if (known) return known;
    auto made = std::make_shared<const Program>(make_program(plan, group().rank, call));
    if (programs_.size() > kMostPrograms) programs_.clear();
    programs_[key] = made;
    return made;
  }

  std::shared_ptr<const AlgorithmChoice> choice_;
  std::vector<int> hosts_;
  std::string backend_;
  std::map<std::string, std::shared_ptr<const Program>> programs_;
  std::string failure_;
  Work last_;
  WorkQueue queue_;  // goes first: its tasks use the others
};

// Numbers the members' hosts in order of appearance. Each rank says where it is once per world.
std::vector<int> hosts_of(const GroupInfo& group, c10d::Store& store) {
  std::vector<std::string> hosts;
  for (int member = 0; member < group.size; ++member) hosts.push_back(store.get_to_str(fmt::format("host/{}", group.world_rank(member))));
  return Hosts(hosts).host_of_members();
}

}  // namespace

std::shared_ptr<Engine> make_algorithm_engine(std::shared_ptr<const AlgorithmChoice> choice, std::vector<int> hosts, const GroupInfo& group,
                                              std::shared_ptr<Engine> inner) {
  return std::make_shared<AlgorithmEngine>(std::move(choice), std::move(hosts), group, std::move(inner));
}

Decorator algorithm_choice(std::shared_ptr<const AlgorithmChoice> choice, const DecoratorContext& context) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("algorithm", context.store);
  const bool needs_hosts = choice->needs_hosts();
  if (needs_hosts) store->set(fmt::format("host/{}", context.environment.rank), context.options.host.empty() ? host_identity() : context.options.host);
  return [choice, store, needs_hosts](std::shared_ptr<Engine> inner, const GroupInfo& group) {
    return make_algorithm_engine(choice, needs_hosts ? hosts_of(group, *store) : std::vector<int>(), group, std::move(inner));
  };
}

}  // namespace tessera::comm
