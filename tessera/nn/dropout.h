#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::kernels {
struct FeatureBlock;
}

namespace tessera::nn {

/// What draws masks, a module or an interceptor of one, and is told which of the ranks it is on that train on other samples, with generators that may be seeded
/// alike.
class DrawsMasks {
 public:
  virtual ~DrawsMasks() = default;
  /// This rank's place among `ranks` that have other samples, for as long as `by` lives. Of several who live, the most ranks have the word, and of as many the
  /// last who spoke: what fewer say, those of a part of the model (its experts), changes nothing, unless the others go.
  void set_replica(int64_t replica, int64_t ranks, std::weak_ptr<const void> by);

 protected:
  int64_t replica() const;  ///< 0 where nobody has the word

 private:
  struct Claim {
    int64_t replica, ranks;
    std::weak_ptr<const void> by;
  };
  std::vector<Claim> claims_;
};

/// Zeroes a share p of the elements and scales the others by 1 / (1 - p) while training.
///   x [B, S, D] or [B, D]; more dimensions where no sequence length, positions or part of a sequence are stated, in which their columns have no place
/// The mask is a function of (seed and step of the SampleScope, module path, global sample, position and feature): the same in any layout, for any
/// micro-batch size, and when the block is computed again. It is not stored: backward draws it anew.
/// Where no scope states a step (a loop of libtorch's own), each call's mask is drawn from libtorch's default generator, and apart on the ranks of a
/// data-parallel wrapper: the same after torch::manual_seed, but not in another layout.
class DropoutImpl : public Module, public DrawsMasks {
 public:
  explicit DropoutImpl(double p = 0.5);

  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  double p;
};
TESSERA_MODULE(Dropout);

/// What a Dropout does while training, for whoever drops elements otherwise than as a module: by the place of each in the whole model's tensor, of whose last
/// dimension x [B, ..., D] holds columns. `name` tells masks of one step apart; where no scope states a step, `name` and `apart` do. Throws ConfigError, by
/// `name`, for more than three dimensions where the scope says how long a sequence is, or which part of one this is: [B, H, S, S] and [B, S, H, D] have
/// columns of their own number.
at::Tensor drop_by_place(const at::Tensor& x, double p, const std::string& name, const std::string& apart, const kernels::FeatureBlock& columns);

/// Whether `module`, or something that is attached to it, draws masks.
bool draws_masks(Module& module);

/// set_replica of everything under `root` that draws masks, modules and what is attached to them; it holds for as long as what is returned.
[[nodiscard]] std::shared_ptr<const void> drop_apart(torch::nn::Module& root, int64_t replica, int64_t ranks);

}  // namespace tessera::nn
