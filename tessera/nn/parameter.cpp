#include "tessera/nn/parameter.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"
#include "tessera/nn/along.h"
#include "tessera/nn/divided_model.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/init_tape.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/late_updates.h"
#include "tessera/nn/names.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/sharing.h"

namespace tessera::nn {

namespace {

/// What we know about a parameter, kept in the slot that TensorImpl has for a backend's own data: it dies with the tensor, is handed to detached aliases,
/// and needs no table beside the tensors. Never changed once set, since aliases share it.
struct ParameterData : c10::BackendMeta {
  std::optional<Slice> slice;
  std::optional<InitRule> init;
  size_t init_position = 0;
  std::shared_ptr<const Origin> origin;
  bool keeps_memory = false, kept_beside = false, follows = false, terms_summed = false, given = false;
  int64_t times_given = 0;
  int64_t late_updates = 0;
  int64_t shown_updates = 0;  ///< writes of its parts that its own counter shows
  int64_t sums_of_terms = 0;  ///< calls of sum_terms that began with it
  std::vector<Sharing> sharings;
  std::vector<Dealt> dealt;
  std::shared_ptr<const DividedModel> divided;
  std::optional<Along> along;
  at::Tensor alike_at_cut;  ///< some values of a part that the whole was, over and over
  std::vector<std::weak_ptr<const void>> users;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> updated_for, drawn_as;
};

c10::intrusive_ptr<ParameterData> as_ours(c10::intrusive_ptr<c10::BackendMeta> meta) {
  return meta ? c10::dynamic_intrusive_pointer_cast<ParameterData>(std::move(meta)) : nullptr;
}

/// libtorch's set_data hands over what the other tensor carries, mostly nothing. Of data of the same shape the parameter stays what it was. Of another shape
/// (the whole in place of a part) it is not, and whoever needs to know more refuses it. How a tensor is drawn goes with its data.
c10::intrusive_ptr<ParameterData> data_of(const at::Tensor& tensor) {
  invariant(tensor.defined(), "an undefined tensor has no slice and no initialization");
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  auto data = as_ours(impl.get_backend_meta_intrusive_ptr());
  auto own = as_ours(GradientDispatcher::known_of(tensor));
  if (!own || own == data || tensor.sizes() != at::IntArrayRef(own->slice->local_shape())) return data;
  own = c10::make_intrusive<ParameterData>(*own);
  own->given = true;
  ++own->times_given;
  if (data && (data->init || data->origin)) {
    own->init = data->init;
    own->init_position = data->init_position;
    own->origin = data->origin;
    own->drawn_as = data->drawn_as;
  }
  GradientDispatcher::know(tensor, own);
  impl.set_backend_meta(own);
  return own;
}

/// Whether this may be a parameter of whose part, or name, there is something to lose: tensors that are none have slices, too.
bool is_known(const at::Tensor& tensor, const ParameterData& data) {
  const bool is_leaf = tensor.is_leaf() && (tensor.is_floating_point() || tensor.is_complex());
  const bool was_trained = torch::autograd::impl::get_autograd_meta(tensor) != nullptr;  // registered so, and frozen since
  return is_leaf && data.slice && (was_trained || !data.slice->is_whole());
}

/// Of what a change speaks: of the parameter's data, or of the parameter whatever it was before.
enum class Of { Data, Parameter };

template <class Change>
void change(const at::Tensor& tensor, Change&& how, Of of = Of::Data) {
  const auto before = data_of(tensor);
  const auto known = GradientDispatcher::known_of(tensor);
  auto data = before ? c10::make_intrusive<ParameterData>(*before) : c10::make_intrusive<ParameterData>();
  how(*data);
  // What is said of data of another shape than the parameter's goes with that data, but for what the parameter is from now on (who cuts it).
  if ((of == Of::Parameter || !known || known == before) && is_known(tensor, *data)) GradientDispatcher::know(tensor, data);
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(data));
}

}  // namespace

void set_init(const at::Tensor& parameter, InitRule rule) {
  change(parameter, [&](ParameterData& data) {
    data.init = rule;
    data.init_position = tape_position();
    data.drawn_as.reset();
  });
}

size_t init_position(const at::Tensor& tensor) {
  const auto data = data_of(tensor);
  return data ? data->init_position : 0;
}

void set_drawn_as(const at::Tensor& copy, const at::Tensor& parameter) {
  change(copy, [&](ParameterData& data) { data.drawn_as.emplace(parameter.getIntrusivePtr()); });
}

at::Tensor drawn_as(const at::Tensor& tensor) {
  const auto data = data_of(tensor);
  if (!data || !data->drawn_as) return tensor;
  auto parameter = data->drawn_as->lock();
  return parameter ? at::Tensor(std::move(parameter)) : tensor;
}

void set_origin(const at::Tensor& tensor, std::shared_ptr<const Origin> origin) {
  change(tensor, [&](ParameterData& data) { data.origin = std::move(origin); });
}

std::shared_ptr<const Origin> origin_of(const at::Tensor& tensor) {
  const auto data = data_of(tensor);
  return data ? data->origin : nullptr;
}

std::optional<InitRule> init_of(const at::Tensor& parameter) {
  const auto data = data_of(parameter);
  return data ? data->init : std::nullopt;
}

bool has_slice(const at::Tensor& tensor) {
  const auto data = data_of(tensor);
  return data && data->slice;
}

const Slice& slice_of(const at::Tensor& tensor) {
  if (!has_slice(tensor)) change(tensor, [&](ParameterData& data) { data.slice = Slice::whole("", tensor.sizes().vec()); });
  return *data_of(tensor)->slice;
}

void set_slice(const at::Tensor& tensor, Slice slice) {
  slice.check();
  change(tensor, [&](ParameterData& data) { data.slice = std::move(slice); }, Of::Parameter);
}

namespace {
/// Of a whole one of which nobody has said more than its name: nothing is lost where that is said of other data.
bool is_name_alone(const ParameterData& data) {
  return data.slice->is_whole() && !data.keeps_memory && !data.follows && data.sharings.empty() && data.dealt.empty() && !data.along && !data.divided &&
         data.users.empty();
}
}  // namespace

void set_name(const at::Tensor& tensor, const std::string& name) {
  Slice named = slice_of(tensor);
  named.name = name;
  const auto known = as_ours(GradientDispatcher::known_of(tensor));
  change(tensor, [&](ParameterData& data) { data.slice = std::move(named); }, !known || is_name_alone(*known) ? Of::Parameter : Of::Data);
}

void set_data_of_same(const at::Tensor& parameter, const at::Tensor& data) {
  invariant(data.sizes() == parameter.sizes(), "data of shape ", data.sizes(), " for a parameter of ", parameter.sizes());
  auto known = parameter.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  parameter.set_data(data);
  parameter.unsafeGetTensorImpl()->set_backend_meta(std::move(known));
}

void keep_memory(const at::Tensor& parameter, bool keeps) {
  change(parameter, [&](ParameterData& data) { data.keeps_memory = keeps; });
}

void keep_beside(const at::Tensor& parameter, bool beside) {
  change(parameter, [&](ParameterData& data) { data.kept_beside = beside; });
}

bool is_kept_beside(const at::Tensor& parameter) {
  const auto data = data_of(parameter);
  return data && data->kept_beside;
}

void restore_known(const at::Tensor& parameter) {
  if (auto known = GradientDispatcher::known_of(parameter)) parameter.unsafeGetTensorImpl()->set_backend_meta(known);
}

bool was_given(const at::Tensor& parameter) {
  const auto data = data_of(parameter);
  return data && data->given;
}

void note_given(const at::Tensor& parameter) {
  change(parameter, [](ParameterData& data) {
    data.given = true;
    ++data.times_given;
  });
}

void note_loaded(const at::Tensor& parameter) {
  if (!data_of(parameter)) return;
  change(parameter, [](ParameterData& data) {
    data.given = false;
    ++data.times_given;
  });
}

int64_t times_given(const at::Tensor& parameter) {
  const auto data = data_of(parameter);
  return data ? data->times_given : 0;
}

void forget_given(const at::Tensor& parameter) {
  if (was_given(parameter)) change(parameter, [](ParameterData& data) { data.given = false; });
}

namespace {
at::Tensor some_values(const at::Tensor& part) {
  constexpr int64_t kSamples = 64;
  const at::Tensor values = part.detach().reshape({-1});
  return values.slice(0, 0, std::nullopt, std::max<int64_t>(1, values.numel() / kSamples)).clone();
}
}  // namespace

void note_alike_at_cut(const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  change(part, [values = some_values(part)](ParameterData& data) { data.alike_at_cut = values; });
}

bool is_as_alike_at_cut(const at::Tensor& part) {
  const auto data = data_of(part);
  if (!data || !data->alike_at_cut.defined()) return false;
  const at::NoGradGuard no_grad;
  const at::Tensor values = some_values(in_use(part));
  return values.equal(data->alike_at_cut.to(values.options()));
}

void announce_write(const at::Tensor& parameter) {
  const c10::NoGradGuard no_grad;
  if (!parameter.is_meta()) at::Tensor(parameter).copy_(parameter);
}

void show_part(const at::Tensor& parameter) {
  if (keeps_memory(parameter) && slice_of(parameter).numel() != parameter.numel()) announce_write(parameter);
}

bool keeps_memory(const at::Tensor& parameter) {
  const auto data = data_of(parameter);
  return data && data->keeps_memory;
}

void set_follows(const at::Tensor& parameter) {
  change(parameter, [](ParameterData& data) { data.follows = true; });
}

bool follows(const at::Tensor& parameter) {
  const auto data = data_of(parameter);
  return data && data->follows;
}

void set_updated_for(const at::Tensor& part, const at::Tensor& parameter) {
  change(part, [&](ParameterData& data) { data.updated_for.emplace(parameter.getIntrusivePtr()); });
}

void set_along(const at::Tensor& parameter, Along along) {
  change(parameter, [&](ParameterData& data) { data.along = along; });
}

std::optional<Along> along_of(const at::Tensor& parameter) {
  const auto data = data_of(parameter);
  return data ? data->along : std::nullopt;
}

void add_user(const at::Tensor& parameter, std::weak_ptr<const void> user) {
  change(parameter, [&](ParameterData& data) {
    std::erase_if(data.users, [](const auto& each) { return each.expired(); });
    data.users.push_back(std::move(user));
  });
}

bool has_user(const at::Tensor& parameter) {
  const auto data = data_of(parameter);
  return data && std::ranges::any_of(data->users, [](const auto& each) { return !each.expired(); });
}

void set_divided(const at::Tensor& parameter, std::shared_ptr<const DividedModel> model) {
  change(parameter, [&](ParameterData& data) { data.divided = std::move(model); });
}

std::shared_ptr<const DividedModel> divided_model_of(const at::Tensor& tensor) {
  const at::Tensor parameter = updated_for(tensor);
  const auto data = parameter.defined() ? data_of(parameter) : nullptr;
  return data ? data->divided : nullptr;
}

at::Tensor updated_for(const at::Tensor& tensor) {
  const auto data = data_of(tensor);
  if (!data || !data->updated_for) return tensor;
  auto parameter = data->updated_for->lock();
  return parameter ? at::Tensor(std::move(parameter)) : at::Tensor();
}

void note_late_update(const at::Tensor& updated) {
  const at::Tensor parameter = updated_for(updated);
  if (!parameter.defined() || parameter.is_same(updated)) return;  // what is updated itself has no parts
  change(parameter, [](ParameterData& data) { ++data.late_updates; });
}

int64_t late_updates(const at::Tensor& updated) {
  const at::Tensor parameter = updated_for(updated);
  const auto data = parameter.defined() ? data_of(parameter) : nullptr;
  return data ? data->late_updates : 0;
}

void show_update(const at::Tensor& updated) {
  const at::Tensor parameter = updated_for(updated);
  if (!parameter.defined() || parameter.is_same(updated)) return;
  parameter.unsafeGetTensorImpl()->bump_version();
  change(parameter, [](ParameterData& data) { ++data.shown_updates; });
}

WriteMark::WriteMark(const at::Tensor& tensor) : writes_(tensor._version()) {
  const at::Tensor parameter = updated_for(tensor);
  if (parameter.defined() && !parameter.is_same(tensor)) {
    const auto data = data_of(parameter);
    writes_ += int64_t{parameter._version()} - (data ? data->shown_updates : 0);
  }
  storage_ = c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl());
}

bool WriteMark::operator==(const WriteMark& other) const { return writes_ == other.writes_ && storage_ == other.storage_; }

void add_sharing(const at::Tensor& parameter, Sharing sharing) {
  change(parameter, [&](ParameterData& data) {
    for (const Sharing& known : data.sharings) invariant(known.axis != sharing.axis, "who shares a parameter over ", sharing.axis, " is said twice");
    data.sharings.push_back(std::move(sharing));
  });
}

void note_dealt(const at::Tensor& parameter, Dealt dealt) {
  change(parameter, [&](ParameterData& data) { data.dealt.push_back(std::move(dealt)); });
}

std::vector<Dealt> dealt_of(const at::Tensor& tensor) {
  const at::Tensor parameter = updated_for(tensor);
  const auto data = parameter.defined() ? data_of(parameter) : nullptr;
  return data ? data->dealt : std::vector<Dealt>{};
}

bool Dealt::holds_others(int world_rank) const {
  for (int member = 0; member < group.size(); ++member) {
    if ((member < first || member >= first + holders) && group.world_rank(member) == world_rank) return true;
  }
  return false;
}

void require_same_parts(const std::string& technique, const std::vector<NamedParameter>& parameters, const std::vector<comm::Group>& groups) {
  const auto is_dealt = [](const NamedParameter& parameter) {
    const auto data = data_of(parameter.tensor);
    return data && !data->dealt.empty();
  };
  if (std::ranges::none_of(parameters, is_dealt)) return;
  for (const comm::Group& group : groups) {
    if (group.size() == 1) continue;
    std::unordered_set<int> members;  // looked up for each parameter, and of many ranks there may be a million
    for (int member = 0; member < group.size(); ++member) members.insert(group.world_rank(member));
    for (const auto& [name, tensor, aliases] : parameters) {
      const auto data = data_of(tensor);
      if (!data) continue;
      for (const Dealt& dealt : data->dealt) {
        for (int holder = 0; holder < dealt.group.size(); ++holder) {
          const int rank = dealt.group.world_rank(holder);
          if (!members.contains(rank) || !dealt.holds_others(rank)) continue;
          throw ConfigError(detail::concat(technique, ": '", name, "' is dealt over ", dealt.group.name(), " by ", dealt.by, ", and rank ", rank,
                                           " of the world, which ", group.name(),
                                           " has as well, holds another part of it: give the group of ranks that hold the same part, such as ",
                                           "mesh[\"dp\"], or leave the parameter to another wrapper (`only`; of experts experts_of)"));
        }
      }
    }
  }
}

namespace {

/// Of what is frozen there is no gradient.
int losses_of(const at::Tensor& parameter) {
  int losses = 1;
  if (!parameter.requires_grad()) return losses;
  for (const Dealt& dealt : dealt_of(parameter)) losses *= dealt.losses;
  return losses;
}

}  // namespace

int ranks_of_mean(const std::string& technique, const torch::nn::Module& root, const std::vector<NamedParameter>& parameters, int ranks, bool sums) {
  constexpr std::string_view way_out = "; leave average false, and divide the loss by the tokens, or samples, of all ranks";
  std::unordered_set<const c10::TensorImpl*> own;
  const NamedParameter* first = nullptr;  // that is trained
  for (const auto& parameter : parameters) {
    own.insert(parameter.tensor.unsafeGetTensorImpl());
    if (!parameter.tensor.requires_grad()) continue;
    if (first == nullptr) first = &parameter;
    require(losses_of(parameter.tensor) == losses_of(first->tensor), technique, ": average: '", parameter.name, "' has gradients of ",
            losses_of(parameter.tensor), " ranks' losses when they come, and '", first->name, "' of ", losses_of(first->tensor),
            ": give experts and the rest to a wrapper each (`only`, experts_of)");
  }
  const int losses = first == nullptr ? 1 : losses_of(first->tensor);
  require(sums || losses == 1, technique, ": average: '", first == nullptr ? "" : first->name, "' has gradients of ", losses,
          " ranks' losses, and over one rank nobody divides them", way_out);
  for (const auto& item : root.named_parameters()) {
    const int others = own.contains(item.value().unsafeGetTensorImpl()) ? 1 : losses_of(item.value());
    require(others == 1 || others < ranks, technique, ": average: '", item.key(), "' has gradients of all ", others,
            " ranks' losses, so that no wrapper sums or divides them", way_out);
  }
  return ranks * losses;
}

std::vector<Sharing> sharings_of(const at::Tensor& tensor) {
  const at::Tensor parameter = updated_for(tensor);
  const auto data = parameter.defined() ? data_of(parameter) : nullptr;
  return data ? data->sharings : std::vector<Sharing>{};
}

void note_terms_summed(const at::Tensor& updated) {
  const at::Tensor parameter = updated_for(updated);
  const auto data = parameter.defined() ? data_of(parameter) : nullptr;
  if (data && !data->terms_summed) change(parameter, [](ParameterData& of) { of.terms_summed = true; });
}

int64_t count_sum_of_terms(const at::Tensor& updated) {
  const at::Tensor parameter = updated_for(updated);
  int64_t count = 0;
  if (parameter.defined()) change(parameter, [&](ParameterData& of) { count = ++of.sums_of_terms; });
  return count;
}

std::optional<std::string> axis_of_unsummed_term(const at::Tensor& updated) {
  const at::Tensor parameter = updated_for(updated);
  const auto data = parameter.defined() ? data_of(parameter) : nullptr;
  if (!data || data->terms_summed) return std::nullopt;
  const auto term = std::ranges::find_if(data->sharings, [](const Sharing& sharing) { return sharing.is_term && sharing.holders > 1; });
  return term == data->sharings.end() ? std::nullopt : std::optional(term->axis);
}

bool is_shared_over(const at::Tensor& parameter, const std::string& axis) {
  const auto data = data_of(parameter);
  return data && std::ranges::any_of(data->sharings, [&](const Sharing& sharing) { return sharing.axis == axis; });
}

std::string whole_name(const std::string& given, const std::string& path) { return given.empty() || path.ends_with("." + given) ? path : given; }

void refuse_shared_names(const torch::nn::Module& root) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::unordered_map<std::string, std::string> paths;
  for (const auto& parameter : root.named_parameters()) {
    if (!parameter.value().defined() || follows(parameter.value()) || !seen.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
    const std::string name = has_slice(parameter.value()) ? whole_name(slice_of(parameter.value()).name, parameter.key()) : parameter.key();
    const auto [it, is_new] = paths.emplace(name, parameter.key());
    require(is_new, "'", it->second, "' and '", parameter.key(), "' are two tensors of one name, '", name,
            "', which they were given when parts of the model were wrapped or named alone; call tessera::nn::assign_paths(model) for the whole model before");
  }
}

namespace {

/// Every parameter once, and those that follow one of them.
struct Listed {
  std::vector<NamedParameter> unique, following;
};

Listed list_parameters(const torch::nn::Module& root) {
  Listed listed;
  auto& [unique, following] = listed;
  std::unordered_map<c10::TensorImpl*, size_t> seen;
  for (const auto& parameter : root.named_parameters()) {
    if (!parameter.value().defined()) continue;
    const auto [it, is_new] = seen.emplace(parameter.value().unsafeGetTensorImpl(), unique.size());
    if (!is_new) {
      unique[it->second].aliases.push_back(parameter.key());
      continue;
    }
    NamedParameter named{has_slice(parameter.value()) ? whole_name(slice_of(parameter.value()).name, parameter.key()) : parameter.key(), parameter.value(), {}};
    const auto followed = follows(named.tensor) ? std::ranges::find(unique, named.name, &NamedParameter::name) : unique.end();
    if (followed == unique.end()) {
      unique.push_back(std::move(named));
      continue;
    }
    it->second = static_cast<size_t>(followed - unique.begin());
    followed->aliases.push_back(parameter.key());
    following.push_back(std::move(named));
  }
  return listed;
}

}  // namespace

std::vector<NamedParameter> unique_parameters(const torch::nn::Module& root) { return list_parameters(root).unique; }

std::vector<NamedParameter> unique_parameters(const torch::nn::Module& root, const ParameterFilter& only) {
  std::vector<NamedParameter> parameters = unique_parameters(root);
  if (only) std::erase_if(parameters, [&](const NamedParameter& parameter) { return !only(parameter); });
  return parameters;
}

std::vector<NamedParameter> following_parameters(const torch::nn::Module& root) { return list_parameters(root).following; }

}  // namespace tessera::nn
