#include "tessera/pipeline/split/split.h"

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/hash.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/divided_model.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sharing.h"
#include "tessera/pipeline/split/own_modules.h"

// A split model is a recording (split/recorder.cpp), cut (cuts.cpp), planned (stages.cpp) and run (program.cpp) by stage. A recording holds what the pass did
// when it was made: it is kept by the shapes of the inputs and by whether modules train, and now and then the pass is recorded again and compared, on all
// ranks alike, so that a program that changes its mind (a member that is a number, another branch) is found out instead of being repeated as it was.

namespace tessera::pipeline {

namespace {

/// What is kept of inputs: their looks. An example that repeats one row (`zeros({1}).expand({3})`) is taken as one that has all: data do.
std::vector<at::Tensor> looks_of(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> looks;
  for (const at::Tensor& tensor : inputs) {
    require(tensor.defined(), "pipeline: example input ", looks.size(), " is undefined; give a tensor of the shape and dtype that the pass gets");
    const auto options = tensor.options().device(at::kMeta).requires_grad(false);
    bool repeats = false;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) repeats |= tensor.stride(dim) == 0 && tensor.size(dim) > 1;
    looks.push_back(repeats ? at::empty(tensor.sizes(), options) : at::empty_strided(tensor.sizes(), tensor.strides(), options));
    looks.back().set_requires_grad(tensor.requires_grad());
  }
  return looks;
}

/// `untrained`: how many first stages are never trained.
Crossings crossings_of(const tape::Stages& stages, int untrained) {
  Crossings crossings;
  for (size_t c = 0; c < stages.crossings.size(); ++c) {
    const tape::Crossing& crossing = stages.crossings[c];
    const auto number = [&](const std::vector<int>& list) { return static_cast<int>(std::ranges::find(list, static_cast<int>(c)) - list.begin()); };
    crossings.push_back({.from = crossing.from,
                         .to = crossing.to,
                         .output = number(stages.stages[static_cast<size_t>(crossing.from)].sends),
                         .input = number(stages.stages[static_cast<size_t>(crossing.to)].receives),
                         .takes_gradient = crossing.gradient && crossing.from >= untrained});
  }
  return crossings;
}

/// The same values, whatever comes back for them.
bool same_ways(const Crossings& a, const Crossings& b) {
  return std::ranges::equal(a, b, [](const Crossing& one, const Crossing& other) {
    return one.from == other.from && one.to == other.to && one.output == other.output && one.input == other.input;
  });
}

/// Whether an executor that was given `all` can run what needs `some`.
bool covers(const Crossings& all, const Crossings& some) {
  return same_ways(all, some) &&
         std::ranges::equal(all, some, [](const Crossing& one, const Crossing& other) { return one.takes_gradient || !other.takes_gradient; });
}

std::string ways(const Crossings& crossings) {
  std::string text;
  for (const Crossing& crossing : crossings) text += detail::concat(text.empty() ? "" : ", ", crossing.from, " to ", crossing.to);
  return text.empty() ? "nothing" : text;
}

/// Passes of one kind after which it is recorded again, to see whether it still is the same: often where a mistake shows first, then rarely.
bool is_checked(int64_t passes) { return passes > 1 && (passes < 64 ? (passes & (passes - 1)) == 0 : passes % 64 == 0); }

constexpr const char* kFrozenWayOut =
    "; a recording keeps the numbers that forward reads of the program (a member that is a number, Dropout's p, a tensor that a pass leaves in a member): make "
    "it a buffer, put it into a module that is declared with TESSERA_MODULE, whose forward runs anew each time, or call SplitModel::record_anew() on every "
    "rank whenever the program has changed it";

}  // namespace

struct SplitModel::State {
  static constexpr size_t kMostRecordings = 64;  // where every step has new shapes, those that were are not worth keeping

  std::shared_ptr<torch::nn::Module> root;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  ///< root and what is in it
  tape::Forward forward;
  SplitSpec splits;
  std::vector<at::Tensor> inputs;                    ///< as they look
  std::map<int, std::vector<at::Tensor>> inputs_of;  ///< of micro-batches that have others
  struct Kept {
    std::shared_ptr<const tape::Recording> recording;
    int64_t passes = 0;  ///< that began with it, of the first stage and micro-batch that ran here: steps
    bool fits = false;   ///< what executors were given
    int64_t number = 0;  ///< ascending
    bool ahead = false;  ///< asked for by recording() before it ran, and has not run since
    bool ran = false;
  };
  int64_t last_number = 0;
  std::map<std::string, Kept> recordings;
  std::set<std::string> settled;                      ///< modes in which two recordings in a row were the same
  std::vector<std::set<std::string>> owned, called;   ///< by stage
  std::map<std::string, std::vector<int64_t>> sizes;  ///< of the parameters, whole
  std::vector<tape::SharedParameter> shared;
  std::map<std::vector<int>, std::shared_ptr<torch::nn::Module>> handed_out;  ///< by stages, ascending: wrappers and optimizers keep no module alive
  SummedGradients summed;
  std::vector<Crossings> given;                        ///< what crossings() has said
  int untrained = 0;                                   ///< first stages that are never trained
  std::optional<std::pair<int, int>> first_in_a_step;  ///< stage and micro-batch

  /// Which ones are known to differ, one for each; -1: all others.
  std::vector<int> micro_batches() const {
    std::vector<int> numbers;
    for (const auto& [number, looks] : inputs_of) numbers.push_back(number);
    if (numbers.empty() || numbers.front() != 0 || numbers.back() + 1 != static_cast<int>(numbers.size())) numbers.push_back(-1);
    return numbers;
  }

  bool is_wrapped() const {
    return std::ranges::any_of(root->parameters(), [](const at::Tensor& parameter) { return nn::owner_of(parameter) != nullptr; });
  }

  std::shared_ptr<const tape::Recording> record(const std::vector<at::Tensor>& inputs, const tape::Graph* compared = nullptr) const {
    return std::make_shared<const tape::Recording>(tape::make_recording(*root, forward, inputs, splits, tape::state_of(*root), compared));
  }

  /// The first of a mode is made until two in a row are the same: a forward may keep a table that it makes once, and must not count.
  std::shared_ptr<const tape::Recording> record_settled(const std::vector<at::Tensor>& inputs) {
    constexpr int most = 3;
    auto made = record(inputs);
    const std::string mode = tape::mode_of(modules);
    for (int times = 2; !settled.contains(mode); ++times) {
      auto again = record(inputs);
      if (again->fingerprint == made->fingerprint) settled.insert(mode);
      require(settled.contains(mode) || times < most, "pipeline: the forward of ", tape::short_name(root->name()),
              " is another one each time: ", tape::first_difference(*made->graph, *again->graph), kFrozenWayOut);
      made = std::move(again);
    }
    return made;
  }

  const std::vector<at::Tensor>& inputs_for(int micro_batch) const {
    const auto found = inputs_of.find(micro_batch);
    return found == inputs_of.end() ? inputs : found->second;
  }

  std::string key(const std::vector<at::Tensor>& inputs) const {
    std::string key = tape::mode_of(modules);
    for (const at::Tensor& input : inputs) key += ", " + tape::to_string(tape::form_of(input)) + (input.requires_grad() ? " with gradient" : "");
    return key;
  }

  /// The same sizes that lie otherwise are another kind of pass where what forward writes into goes by it.
  static bool lie_as_recorded(const tape::Recording& recording, const std::vector<at::Tensor>& inputs) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const int value = recording.graph->inputs[i];
      if (!recording.takes_layout(value, inputs[i], recording.graph->values[static_cast<size_t>(value)].forms.front().form)) return false;
    }
    return true;
  }

  /// Room for one more. What ranks hold slices of cannot be recorded again.
  void drop_oldest() {
    const auto named = root->named_parameters();
    const auto is_cut = [&](const auto& item) { return sizes.contains(item.key()) && item.value().sizes() != sizes.at(item.key()); };
    if (std::ranges::any_of(named, is_cut)) return;
    auto oldest = recordings.end();
    for (auto it = recordings.begin(); it != recordings.end(); ++it) {
      if (!it->second.ahead && (oldest == recordings.end() || it->second.number < oldest->second.number)) oldest = it;
    }
    if (oldest != recordings.end()) recordings.erase(oldest);
  }

  /// What cuts layers (tensor parallelism, experts) changes what their calls give, and so has to be there when a pass is recorded.
  void refuse_later_cuts() const {
    for (const auto& item : root->named_parameters()) {
      const auto before = sizes.find(item.key());
      if (before == sizes.end() || item.value().sizes() == before->second || nn::keeps_memory(item.value())) continue;
      for (const nn::Dealt& dealt : nn::dealt_of(item.value())) {
        throw ConfigError(detail::concat("pipeline: '", item.key(), "' was cut over ", dealt.group.name(), " by ", dealt.by,
                                         " after pipeline::split had recorded the model; call ", dealt.by, " before pipeline::split"));
      }
    }
  }

  /// Once a wrapper has cut them, forward cannot be run over them but within its own passes.
  void refuse_slices(const std::string& key) const {
    refuse_later_cuts();
    for (const auto& item : root->named_parameters()) {
      const auto whole = sizes.find(item.key());
      if (whole == sizes.end() || item.value().sizes() == whole->second) continue;
      require(false, "pipeline: no pass with these inputs and modes (", key, ") was recorded before fully_shard cut the stage, and '", item.key(),
              "' is a slice of ", item.value().sizes(), " in place of ", at::IntArrayRef(whole->second),
              " now; before wrapping, on every rank, record each kind of pass that is to come: expect() its shapes, switch train() or eval(), and call "
              "recording(), under NoGradGuard for one without gradients");
    }
  }

  Kept& kept(int micro_batch) {
    const auto& inputs = inputs_for(micro_batch);
    std::string key = this->key(inputs);
    if (const auto alike = recordings.find(key); alike != recordings.end() && alike->second.recording && !lie_as_recorded(*alike->second.recording, inputs)) {
      for (const at::Tensor& input : inputs) key += detail::concat(", strides ", input.strides());
    }
    if (recordings.size() >= kMostRecordings && !recordings.contains(key)) drop_oldest();
    Kept& found = recordings[key];
    if (!found.recording) {
      found.number = ++last_number;
      refuse_slices(key);
      auto made = record_settled(inputs);
      if (owned.empty()) {
        deal(*made);
      } else {
        check_owners(*made, key);
      }
      found.recording = std::move(made);
    }
    return found;
  }

  void check_fits(Kept& kept, int micro_batch) const {
    if (kept.fits || given.empty()) return;
    const Crossings now = crossings_of(kept.recording->stages, untrained);
    require(std::ranges::any_of(given, [&](const Crossings& one) { return covers(one, now); }), "pipeline: micro-batch ", micro_batch,
            ", with the shapes and modes of now, sends other tensors between stages (", ways(now), ") than the executor was told (", ways(given.back()),
            "), or needs gradients for others; take SplitModel::crossings() behind expect(), train() and eval(), and make the executor anew of them, on every "
            "rank");
    kept.fits = true;
  }

  /// Without calls of modules that are recorded whole. What these leave in members may be missing then, so it takes a whole pass to say that it is another one.
  bool is_the_same(const Kept& kept, int micro_batch) const {
    try {
      return record(inputs_for(micro_batch), kept.recording->graph.get())->fingerprint == kept.recording->fingerprint;
    } catch (const std::exception&) {
      return false;
    }
  }

  /// While a wrapper counts passes, a recording would be one more to it.
  void check_still_the_same(Kept& kept, int stage, int micro_batch) {
    if (!first_in_a_step) first_in_a_step = {stage, micro_batch};
    if (*first_in_a_step != std::pair(stage, micro_batch)) return;
    if (kept.passes == 0) refuse_later_cuts();
    if (!is_checked(++kept.passes) || is_wrapped() || is_the_same(kept, micro_batch)) return;
    const auto again = record(inputs_for(micro_batch));
    require(again->fingerprint == kept.recording->fingerprint, "pipeline: the forward of ", tape::short_name(root->name()),
            " is not the one that was recorded: ", tape::first_difference(*kept.recording->graph, *again->graph), kFrozenWayOut);
  }

  /// Whose every parameter is. One that the pass does not use goes with the one registered before it, so that no checkpoint loses it.
  void deal(const tape::Recording& made) {
    owned.resize(static_cast<size_t>(made.stages.size()));
    called.resize(owned.size());
    std::map<std::string, std::set<size_t>> users;
    for (size_t s = 0; s < owned.size(); ++s) {
      const auto& stage = made.stages.stages[s];
      for (const int v : stage.state) {
        const tape::Value& value = made.graph->values[static_cast<size_t>(v)];
        users[value.name].insert(s);
        for (const std::string& alias : value.aliases) users[alias].insert(s);
      }
      for (int i = stage.begin; i < stage.end; ++i) {
        const tape::Node& node = made.graph->nodes[static_cast<size_t>(i)];
        if (node.call) called[s].insert(node.path);
      }
    }
    shared = made.stages.shared;
    std::set<size_t> before{0};
    const auto give = [&](const std::string& name) {
      if (const auto found = users.find(name); found != users.end()) before = found->second;
      for (const size_t s : before) {
        owned[s].insert(name);
        if (!users.contains(name)) break;
      }
    };
    for (const auto& item : root->named_parameters()) give(item.key());
    for (const auto& item : root->named_buffers()) give(item.key());
  }

  void check_owners(const tape::Recording& made, const std::string& key) const {
    for (size_t s = 0; s < owned.size(); ++s) {
      for (const int v : made.stages.stages[s].state) {
        const std::string& name = made.graph->values[static_cast<size_t>(v)].name;
        require(owned[s].contains(name), "pipeline: with these inputs and modes (", key, ") stage ", s, " uses '", name,
                "', which it did not when the model was split; split it in the mode and with the shapes that use all of it");
      }
    }
  }
};

SplitModel::SplitModel(std::shared_ptr<torch::nn::Module> root, tape::Forward forward, std::vector<at::Tensor> example_inputs, SplitSpec splits)
    : state_(std::make_shared<State>()) {
  tape::check_split_points(*root, splits);
  nn::assign_paths(*root);
  state_->modules = root->modules(/*include_self=*/false);
  state_->modules.push_back(root);
  state_->root = std::move(root);
  state_->forward = std::move(forward);
  state_->splits = std::move(splits);
  for (const auto& item : state_->root->named_parameters()) state_->sizes[item.key()] = item.value().sizes().vec();
  expect(example_inputs);
  recording();
  if (stages() > 1) mark_parts();
}

void SplitModel::mark_parts() const {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : nn::unique_parameters(*state_->root)) {
    if (parameter.tensor.is_floating_point() || parameter.tensor.is_complex()) parameters.push_back(parameter.tensor);
  }
  const auto whole = std::make_shared<const nn::DividedModel>(nn::DividedModel{
      .parameters = parameters.size(),
      .way_out = "other ranks hold the pipeline's other stages; call pipeline::clip_grad_norm(split, schedule, ranks, max_norm) on every rank of the pipeline, "
                 "behind sum_shared_gradients"});
  for (const at::Tensor& parameter : parameters) nn::set_divided(parameter, whole);
}

int SplitModel::stages() const { return static_cast<int>(state_->splits.size()) + 1; }

std::string SplitModel::to_string() const { return tape::to_string(*recording(), tape::short_name(state_->root->name())); }

std::shared_ptr<const tape::Recording> SplitModel::recording(int micro_batch) const {
  State::Kept& kept = state_->kept(micro_batch);
  kept.ahead = kept.ahead || !kept.ran;
  return kept.recording;
}

std::shared_ptr<const tape::Recording> SplitModel::recording_to_run(int stage, int micro_batch) const {
  State::Kept& kept = state_->kept(micro_batch);
  kept.ahead = false;
  kept.ran = true;
  if (stage < state_->untrained) check_untrained(stage);
  state_->check_fits(kept, micro_batch);
  state_->check_still_the_same(kept, stage, micro_batch);
  return kept.recording;
}

void SplitModel::train_from(int stage) const {
  require(stage >= 0 && stage < stages(), "pipeline: train_from(", stage, "): the model has stages 0 to ", stages() - 1, ", and the last one is trained");
  state_->untrained = stage;
  state_->given.clear();
  for (auto& [key, kept] : state_->recordings) kept.fits = false;
}

void SplitModel::check_untrained(int stage) const {
  for (const auto& item : module(stage)->named_parameters()) {
    require(!item.value().requires_grad(), "pipeline: '", item.key(), "' of stage ", stage, " requires a gradient, and train_from(", state_->untrained,
            ") has said that no stage before ", state_->untrained, " is trained; set_requires_grad(false), or train_from an earlier stage");
  }
}

void SplitModel::record_anew() const {
  state_->recordings.clear();
  state_->settled.clear();
}

Crossings SplitModel::crossings() const {
  std::optional<Crossings> now;
  if (!at::GradMode::is_enabled()) now = crossings_of_now();
  const c10::InferenceMode with_gradients(false);  // whatever is on around the caller
  Crossings all = crossings_of_now();
  if (now && !same_ways(*now, all)) all = std::move(*now);  // an executor of forwards alone
  if (std::ranges::find(state_->given, all) == state_->given.end()) state_->given.push_back(all);
  return all;
}

Crossings SplitModel::crossings_of_now() const {
  const std::vector<int> numbers = state_->micro_batches();
  const auto of = [&](int number) { return crossings_of(state_->kept(number).recording->stages, state_->untrained); };
  Crossings all = of(numbers[0]);
  for (const int number : numbers) {
    const Crossings more = of(number);
    require(same_ways(all, more), "pipeline: micro-batches ", numbers[0], " and ", number,
            " (-1: those without shapes of their own) send other tensors between "
            "stages (",
            ways(all), "; ", ways(more), "), since forward goes another way for other shapes; make what crosses the same, or split elsewhere");
    for (size_t c = 0; c < all.size(); ++c) all[c].takes_gradient |= more[c].takes_gradient;
  }
  return all;
}

SummedGradients& SplitModel::summed() const { return state_->summed; }

const std::vector<tape::SharedParameter>& SplitModel::shared() const { return state_->shared; }

std::vector<int> SplitModel::takes(int stage) const {
  check_stage(stage);
  return recording()->stages.stages[static_cast<size_t>(stage)].fed;
}

std::shared_ptr<torch::nn::Module> SplitModel::module(int stage) const { return module(std::vector<int>{stage}); }

std::shared_ptr<torch::nn::Module> SplitModel::module(const std::vector<int>& stages) const {
  const std::set<int> each(stages.begin(), stages.end());
  for (const int stage : each) check_stage(stage);
  auto& part = state_->handed_out[std::vector<int>(each.begin(), each.end())];
  if (part) return part;
  std::set<std::string> owned, called;
  for (const int stage : each) {
    owned.insert(state_->owned[static_cast<size_t>(stage)].begin(), state_->owned[static_cast<size_t>(stage)].end());
    called.insert(state_->called[static_cast<size_t>(stage)].begin(), state_->called[static_cast<size_t>(stage)].end());
  }
  const auto others = [of = std::weak_ptr(state_), key = std::vector<int>(each.begin(), each.end())] {
    std::set<const torch::nn::Module*> others;
    const auto state = of.lock();
    if (!state) return others;
    for (const auto& [stages, other] : state->handed_out) {
      if (!other) continue;
      for (const auto& module : other->modules()) others.insert(module.get());
    }
    for (const auto& module : state->handed_out.at(key)->modules()) others.erase(module.get());
    return others;
  };
  return part = tape::own_modules(*state_->root, owned, called, others);
}

void SplitModel::keep_only(const std::vector<int>& stages) const {
  std::set<const c10::TensorImpl*> kept;
  const auto part = module(stages);
  for (const at::Tensor& tensor : part->parameters()) kept.insert(tensor.unsafeGetTensorImpl());
  for (const at::Tensor& tensor : part->buffers()) kept.insert(tensor.unsafeGetTensorImpl());
  const auto let_go = [&](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_meta() && !kept.contains(tensor.unsafeGetTensorImpl())) nn::materialize_storage(tensor, at::kMeta);
  };
  for (const at::Tensor& tensor : state_->root->parameters()) let_go(tensor);
  for (const at::Tensor& tensor : state_->root->buffers()) let_go(tensor);
}

void SplitModel::check_stage(int stage) const {
  require(stage >= 0 && stage < stages(), "pipeline: there is no stage ", stage, "; the model has stages 0 to ", stages() - 1);
}

void SplitModel::expect(const std::vector<at::Tensor>& inputs) const {
  state_->inputs = looks_of(inputs);
  state_->inputs_of.clear();
}

void SplitModel::expect(const std::vector<at::Tensor>& inputs, int micro_batch) const { state_->inputs_of[micro_batch] = looks_of(inputs); }

bool SplitModel::expects_gradient(int micro_batch, int input) const { return state_->inputs_for(micro_batch).at(static_cast<size_t>(input)).requires_grad(); }

void SplitModel::check_agreement(const comm::Group& group) const {
  Hasher hasher;
  hasher.update(&state_->untrained, sizeof state_->untrained);
  for (const int micro_batch : state_->micro_batches()) {
    const uint64_t fingerprint = recording(micro_batch)->fingerprint;
    hasher.update(&fingerprint, sizeof fingerprint);
  }
  const auto mine = static_cast<int64_t>(hasher.value());
  const at::Tensor in = at::empty({1}, at::device(at::kCPU).dtype(at::kLong)).fill_(mine), all = at::empty({group.size()}, in.options());
  comm::all_gather(group, all, in);
  for (int rank = 0; rank < group.size(); ++rank) {
    require(all.data_ptr<int64_t>()[rank] == all.data_ptr<int64_t>()[0], "pipeline: ranks 0 and ", rank, " of group '", group.name(),
            "' have recorded different graphs of ", tape::short_name(state_->root->name()),
            "; build the same model on every rank, give expect() the same shapes, say the same of train_from(), switch train() and autocast alike, and let "
            "modules hook what they are given on all ranks or on none");
  }
}

}  // namespace tessera::pipeline
