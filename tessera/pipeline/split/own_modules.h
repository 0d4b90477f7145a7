#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>

#include <torch/nn/module.h>

namespace tessera::tape {

/// What one stage keeps of `root`: a tree of modules under the same paths, so that every name is what it is in the whole model. A module that belongs to the
/// stage with all that it holds is itself; of one that belongs to several, there is a plain one with this stage's part.
/// `owned`: names of parameters and buffers; `called`: paths of modules that come along although they hold nothing. `others`: modules that somebody else sets
/// to train() or eval(), as it is asked when this is done; all that are left in `root` go along with this stage's. Never null.
using Others = std::function<std::set<const torch::nn::Module*>()>;
std::shared_ptr<torch::nn::Module> own_modules(torch::nn::Module& root, const std::set<std::string>& owned, const std::set<std::string>& called,
                                               const Others& others);

}  // namespace tessera::tape
