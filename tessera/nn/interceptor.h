#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/layout/slice.h"
#include "tessera/nn/values.h"

namespace tessera::nn {

class Module;
class Interceptor;

/// Interceptors of one module, the innermost first. Never changed once made: attaching and detaching put another in its place, so a call that
/// is under way, and one that is kept to be repeated, see the chain they began with.
using Chain = std::vector<std::shared_ptr<Interceptor>>;

/// A call of a module, from the outside: through what is attached to it by the time it is made. Keeps nothing alive; to be used for as long as the module
/// lives.
class Recall {
 public:
  using Forward = Values (*)(Module&, const Values&);

  Recall(Module* module, Forward forward) : module_(module), forward_(forward) {}

  Values operator()(Values inputs) const;

 private:
  Module* module_;
  Forward forward_;
};

/// The rest of a call: what lies further in, and at last `forward` itself. A small value that may be copied, kept and called again later
/// (recompute does) for as long as the module lives; it keeps the interceptors it passes alive. Collectives further in carry the module's path
/// (comm::CallSite); a call that nothing intercepts does not name itself, for that would cost it a tenth of its time.
class Next {
 public:
  using Forward = Recall::Forward;

  Next(std::shared_ptr<const Chain> chain, size_t remaining, Module* module, Forward forward)
      : chain_(std::move(chain)), remaining_(remaining), module_(module), forward_(forward) {}

  Values operator()(Values inputs) const;

  /// The whole call, to be made again later.
  Recall recall() const { return {module_, forward_}; }

 private:
  std::shared_ptr<const Chain> chain_;
  size_t remaining_;
  Module* module_;
  Forward forward_;
};

/// Where the (first) output of a module lives, as an interceptor states it: which boxes of the logical output this rank holds, and over which mesh
/// axes it, or the gradient that arrives at it, is a partial sum that has yet to be added up. What reads it needs no knowledge of the technique (comparison
/// with one device, refusals).
struct OutputLayout {
  std::vector<Box> boxes;                            ///< of the logical output; empty: the whole
  std::vector<std::string> partial_over;             ///< mesh axes; empty: final values
  std::vector<std::string> gradient_partial_over{};  ///< the same of the gradient: each rank uses the output for its own part of what follows
};

/// Something that every call of a module passes through (design: techniques attach from outside).
class Interceptor {
 public:
  virtual ~Interceptor() = default;

  /// Takes the place of the call: may change `inputs`, call `next` (any number of times), change what it returns. The values keep the number and
  /// kinds that `forward` declares. May throw; nothing needs undoing.
  virtual Values call(Module& module, Values inputs, const Next& next) = 0;

  /// The module's parameters are about to be read ahead of its call (announce_use): whoever brings them for calls does so now.
  virtual void before_use(Module& module) {}

  /// States where `output` (the first tensor this interceptor returns) lives; nothing: where it lived before.
  virtual std::optional<OutputLayout> output_layout(const Module& module, const at::Tensor& output) const { return std::nullopt; }
};

}  // namespace tessera::nn
