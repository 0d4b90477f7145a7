#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "tessera/nn/parameter.h"

/// How a tensor that was built on meta would have got its values: the operators that the constructors of its model ran are noted while they run, and later
/// either read as a rule (one distribution, one constant), of which any part can be drawn by itself, or run again for the one tensor that is asked for
/// (as torchdistX's deferred initialization does). So modules of libtorch and of users are initialized by their own code.
namespace tessera::nn {

class InitTape {
 public:
  /// A strided view of one memory, or a tensor that was there before.
  struct View {
    int memory = -1;  ///< number of the storage; -1: `outside`
    at::Tensor outside{};
    std::vector<int64_t> sizes{}, strides{};
    int64_t offset = 0;
    at::ScalarType dtype = at::kFloat;
    bool conjugate = false, negative = false;  ///< what it makes of the memory's numbers when they are read
    bool covers = false;                       ///< every element of the memory, in order
  };

  /// What of the tape makes one tensor: numbers of its operators, ascending, and those of them that draw random numbers.
  struct Recipe {
    std::vector<size_t> operators, random;
    bool written = false;          ///< whether anything gives it values
    std::optional<InitRule> rule;  ///< where all of them amount to one
    std::optional<size_t> draw;    ///< the random operator whose numbers that rule describes
    std::optional<int> blank;      ///< it is a plain copy of this memory, to which the tape gives no values: set_init() may
    size_t last = 0;               ///< the last operator that writes it
  };

  struct Operator;
  InitTape();
  ~InitTape();
  InitTape(const InitTape&) = delete;
  InitTape& operator=(const InitTape&) = delete;

  /// Before the operator runs, and after: then its results are marked (see origin_of).
  std::shared_ptr<Operator> begin(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  static void end(const std::shared_ptr<InitTape>& tape, std::shared_ptr<Operator> op, const torch::jit::Stack& stack);
  /// No more is recorded: memories are known by number alone.
  void close();
  size_t size() const;

  Recipe recipe_for(const View& target) const;

  /// Runs the recipe on the CPU and returns `target`, whole. `seed_of` gives the seed of each random operator. Throws ConfigError, said of `name`, for an
  /// operator that cannot be run again, and where part of the tensor was never given values.
  at::Tensor run(const View& target, const Recipe& recipe, const std::string& name, const std::function<uint64_t(size_t)>& seed_of) const;

 private:
  struct Memories;
  View view_of(const at::Tensor& tensor);
  /// Numbers of the operators that `target` depends on, ascending.
  std::vector<size_t> writers_of(const View& target) const;

  std::vector<std::shared_ptr<Operator>> operators_;
  std::vector<std::vector<size_t>> writers_;  ///< of each memory, ascending; the first made it
  std::unique_ptr<Memories> memories_;        ///< while recording
};

/// Where a tensor made on meta comes from.
struct Origin {
  std::shared_ptr<const InitTape> tape;
  InitTape::View view;
  std::optional<uint32_t> version;  ///< when the recording ended, until it is materialized
};
std::shared_ptr<const Origin> origin_of(const at::Tensor& tensor);
void set_origin(const at::Tensor& tensor, std::shared_ptr<const Origin> origin);

/// Whether the tensor was written on meta after the recording ended: no one knows what.
bool written_since(const at::Tensor& tensor);
/// The tensor has values: further writes are no loss.
void forget_version(const at::Tensor& tensor);

/// A copy of a parameter that is drawn by a rule is drawn with that parameter's name: the same numbers. Until set_init speaks of it again.
void set_drawn_as(const at::Tensor& copy, const at::Tensor& parameter);
/// Itself, where it is no such copy.
at::Tensor drawn_as(const at::Tensor& tensor);

/// How much of a tape had been recorded when set_init() spoke of the tensor: what writes it later has the last word.
size_t init_position(const at::Tensor& tensor);

/// Of the tape that this thread records; where it records none, past all of them.
size_t tape_position();

}  // namespace tessera::nn
