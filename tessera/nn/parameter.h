#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/layout/slice.h"

namespace tessera::nn {

/// How a parameter's elements are drawn: each a pure function of (seed, logical name, index in the logical tensor).
struct InitRule {
  enum class Kind { Constant, Normal, Uniform };
  Kind kind = Kind::Constant;
  double a = 0;                                    ///< the constant; the mean; the lower bound
  double b = 0;                                    ///< -; the standard deviation; the upper bound
  std::optional<int64_t> zero_row = std::nullopt;  ///< this row of dimension 0 is zero all the same (the padding of an embedding)
  bool is_real = false;                            ///< of a complex parameter: its imaginary part is zero

  static InitRule constant(double value) { return {.kind = Kind::Constant, .a = value}; }
  static InitRule zeros() { return constant(0); }
  static InitRule ones() { return constant(1); }
  static InitRule normal(double mean, double std) { return {.kind = Kind::Normal, .a = mean, .b = std}; }
  static InitRule uniform(double low, double high) { return {.kind = Kind::Uniform, .a = low, .b = high}; }
};

/// Sets how `materialize` draws this parameter. Kept on the tensor itself, as the slice is: no table outlives it.
void set_init(const at::Tensor& parameter, InitRule rule);
std::optional<InitRule> init_of(const at::Tensor& parameter);

/// The rule libtorch uses for this parameter of this kind of module (`module` registers it as `name`): linear layers, convolutions, embeddings, norms and
/// recurrent layers of torch::nn; nothing for others.
std::optional<InitRule> default_init(const torch::nn::Module& module, const std::string& name);

/// Which part of which logical tensor this rank's tensor holds. Without set_slice: all of itself, under the name assign_paths gave it
/// (none before). A detached alias has the slice of its origin; views do not.
const Slice& slice_of(const at::Tensor& tensor);
bool has_slice(const at::Tensor& tensor);
void set_slice(const at::Tensor& tensor, Slice slice);

/// Gives the parameter other data of its shape (libtorch's set_data), in another dtype for instance, and keeps all that is known of it here. After set_data
/// alone it is known for the same part, but drawn as the data says (set_init), and a tensor that was never trained is known for what the data is.
void set_data_of_same(const at::Tensor& parameter, const at::Tensor& data);

/// Says that someone else gives this parameter its memory (a flat buffer of slices): `materialize` draws into it and never puts another in its place.
void keep_memory(const at::Tensor& parameter, bool keeps = true);
bool keeps_memory(const at::Tensor& parameter);

/// A parameter with the name of its first use, and the names of its further uses where it is tied.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases;
};

/// Every parameter of `root` once, in the order of registration. Tied ones (one tensor registered in several places, or one that follows another) carry the
/// other names as aliases, where torch's named_parameters lists them again. Names are paths below `root`, or the logical names
/// where those are set.
std::vector<NamedParameter> unique_parameters(const torch::nn::Module& root);

/// Which parameters of a module somebody takes care of, where it is not all: those that are dealt over other ranks than the rest (experts). Unset: all.
using ParameterFilter = std::function<bool(const NamedParameter&)>;
std::vector<NamedParameter> unique_parameters(const torch::nn::Module& root, const ParameterFilter& only);

/// Says that this parameter is a copy of the one of the same logical name, for modules that are sharded or synchronized apart and use one parameter: that one
/// is trained, saved and loaded, this one takes its values (pipeline::TiedCopies). In a `root` that does not hold the other it is a parameter as any other.
void set_follows(const at::Tensor& parameter);
bool follows(const at::Tensor& parameter);

/// Those of `root` that follow another of it, under its name.
std::vector<NamedParameter> following_parameters(const torch::nn::Module& root);

}  // namespace tessera::nn
