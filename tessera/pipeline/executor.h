#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"
#include "tessera/nn/weight_gradients.h"
#include "tessera/pipeline/channels.h"
#include "tessera/pipeline/itinerary.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/stage.h"
#include "tessera/pipeline/step_times.h"
#include "tessera/pipeline/weight_versions.h"

namespace tessera::pipeline {

/// Runs an action, given as `body`, with whatever has to be around it: announcements, scopes, clocks. What other ranks send is there when it is called.
using Around = std::function<void(const schedules::Action& action, const std::function<void()>& body)>;

struct ExecutorOptions {
  Channels ranks{};              ///< of the pipeline: its ranks are the schedule's; a group, or several (channels.h)
  at::Device device = at::kCPU;  ///< where what comes from other ranks is put
  Around around{};

  // Of asynchronous schedules alone:
  std::map<int, std::vector<at::Tensor>> weights{};  ///< of each of this rank's stages: the parameters that its updates change (WeightVersions)
  std::function<void(int stage)> update{};           ///< changes a stage's weights, in place, by the gradients they have, which are then cleared
};

/// Carries out one rank's part of any schedule: forwards, backwards whole or in halves, updates in their midst, and the messages between.
///
/// A receive is posted one action before it is needed, a send as soon as there is something to send, and is waited for when the step ends: so both ends of a
/// link may send at once. A value for a stage of the same rank passes without a message. An output keeps the edge of its graph and no data once it is sent;
/// inputs and graph go with the backward. Backward halves: the first leaves the gradients of weights (nn/weight_gradients.h), the second computes them.
///
///   traffic   each value that crosses to another rank once, each gradient once; an announced one 80 bytes more
///   memory    the graphs of the micro-batches that are alive; a received value one action ahead; sent values until the peer has them; the weights that
///             WeightVersions keeps
///
/// An action of an asynchronous schedule computes with the weights of its version; a step begins with version 0, the weights as they are, and leaves the
/// newest.
///
/// An error of an action says which it was: "stage 2, forward of micro-batch 5: ..."; so do the collectives in it (comm::CallSite) that name no module, a
/// receive by the action that takes it, and the flight record while the action lasts (Group::set_place). One stage has no name. One rank, one thread.
///
/// The first run() connects the ranks that send each other something, where the engine asks for that (comm/connect.h): receives are posted ahead of what the
/// peers wait for.
///
/// What ranks had sent each other when an action threw stays on its way, so no executor of that group runs on this rank again: run() throws Error.
class Executor {
 public:
  /// `stages`: those of this rank, by number; they have to outlive this.
  Executor(const schedules::Schedule& schedule, Crossings crossings, std::map<int, Stage*> stages, ExecutorOptions options);

  /// One step, with gradients where the schedule has backwards; without, the caller's grad mode counts. `times`: takes down when each action ran; read() it.
  void run(StepTimes* times = nullptr);

  /// Whether the gradients of weights of this action's stage and micro-batch come in an action of their own.
  bool leaves_weights(const schedules::Action& action) const { return splits_.contains({action.stage, action.micro_batch}); }

 private:
  struct Arrival {
    at::Tensor tensor;
    comm::Pending pending{};
    bool is_header = false;  ///< what has come says what will come
  };
  /// Of a stage's micro-batch, from its forward to its last gradient.
  struct Alive {
    std::vector<at::Tensor> inputs;
    std::map<int, std::pair<TensorSpec, torch::autograd::Edge>> outputs;  ///< by crossing
    at::Tensor loss;
    std::shared_ptr<nn::WeightGradients> later;
  };
  using Value = std::tuple<int, int, bool>;  ///< crossing, micro-batch, whether it is its gradient

  void refuse_what_is_left() const;
  void refuse_one_way() const;
  void connect();
  void carry_out(const schedules::Action& action);
  void compute(const schedules::Action& action);
  void forward(const schedules::Action& action);
  void backward(const schedules::Action& action, bool whole);
  void post(const Message& message);
  void wait_for(const Message& message);
  void send(const Message& message);
  at::Tensor take(const Value& value);
  void drop_sent();
  const comm::Group& from(int peer) const { return options_.ranks.between(peer, options_.ranks.rank()); }
  const comm::Group& to(int peer) const { return options_.ranks.between(options_.ranks.rank(), peer); }
  Alive& alive(const schedules::Action& action) { return alive_[{action.stage, action.micro_batch}]; }

  schedules::Schedule schedule_;
  Crossings crossings_;
  std::map<int, Stage*> stages_;
  ExecutorOptions options_;
  std::vector<Leg> legs_;
  std::vector<std::string> names_;        ///< of each leg; empty where there is one stage
  std::set<std::pair<int, int>> splits_;  ///< stage and micro-batch: see leaves_weights

  std::map<Value, std::string> taker_of_;  ///< of what comes: which action takes it
  std::map<Value, Arrival> arrivals_;      ///< for actions to come
  std::map<Value, at::Tensor> leaving_;    ///< made by the action that runs, to be sent
  std::map<std::pair<int, int>, Alive> alive_;
  std::list<comm::Pending> sending_;
  bool connected_ = false;
  std::map<int, WeightVersions> versions_;  ///< of each stage, where the schedule is asynchronous
};

/// Tags of the messages of so many micro-batches are below this; others may send between the same ranks under it and above.
int end_of_tags(int micro_batches, const Crossings& crossings);

/// "stage 2, forward of micro-batch 5", as errors, flight records and verdicts name an action.
std::string describe(const schedules::Action& action);

}  // namespace tessera::pipeline
