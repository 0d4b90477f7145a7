#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/nn/interceptor.h"
#include "tessera/nn/module.h"
#include "tessera/nn/saved_tensors.h"
#include "tessera/recompute/former_buffers.h"
#include "tessera/recompute/kept_outputs.h"
#include "tessera/recompute/kept_values.h"
#include "tessera/recompute/thread_state.h"

namespace tessera {

/// One call of a module whose saved tensors are dropped, with what it takes to make them again. The graph that the call left holds a slot in place of each
/// tensor; the slots own this. The first that is asked for makes the call once more, detached from that graph; the tensors saved on the way, in the same
/// order, go to the slots that still live, and when the last of them is served the call is broken off. Each tensor is handed out once and then forgotten:
/// a graph that is kept for another backward makes the call again.
class RecomputedCall : public std::enable_shared_from_this<RecomputedCall> {
 public:
  /// Makes the call. `keep`: operators whose outputs are kept; null: none. `before`: a call whose outputs are computed again where they are inputs of this
  /// one, instead of being kept; null: none. `latest`: is told of the call, so that it may be that of another; null: nobody is.
  static nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next, std::shared_ptr<const std::set<std::string>> keep,
                         std::shared_ptr<RecomputedCall> before = nullptr, std::weak_ptr<RecomputedCall>* latest = nullptr);

  RecomputedCall(nn::Module& module, const nn::Values& inputs, const nn::Next& next, std::shared_ptr<const std::set<std::string>> keep,
                 std::shared_ptr<RecomputedCall> before);

 private:
  class Slot;
  class Dropper;
  class Filler;
  class OutputSlot;
  class FromBefore;

  /// What the call returned, but for the values.
  struct Output {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< a name to compare
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    at::ScalarType dtype;
    int64_t version = 0;  ///< when it was returned: what the program writes into it since, nobody would compute again
    at::Tensor again{};   ///< computed again and not yet asked for
  };

  /// What the first forward pass saved, but for the values.
  struct Entry {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
    c10::VariableVersion writes;  ///< of the tensor that is gone: whoever still has its memory and writes it is refused, as where it is kept
    uint32_t version = 0;         ///< when it was saved
    bool alive = true;            ///< its slot is
    at::Tensor tensor{};          ///< computed again and not yet asked for
  };

  static KeptValues keep(const nn::Values& inputs, std::shared_ptr<RecomputedCall> before);
  void note_outputs(const nn::Values& outputs);
  std::optional<size_t> output_that_is(const at::Tensor& tensor) const;
  at::Tensor output(size_t index);
  at::Tensor unpack(size_t index);
  void compute_again(bool to_the_end = false);
  bool pass_again(bool to_the_end);
  void note_state(std::vector<std::optional<uint32_t>>& versions) const;
  void forward_done();
  void refuse_written() const;
  void take_outputs(const nn::Values& outputs);
  [[noreturn]] void refuse_more(const std::string& by) const;
  [[noreturn]] void refuse_caught() const;
  [[noreturn]] void refuse(size_t index, const std::string& found) const;

  std::shared_ptr<torch::nn::Module> module_;
  std::string path_;
  nn::Next next_;
  KeptValues inputs_;
  ThreadState state_;
  std::optional<KeptOutputs> outputs_;
  FormerBuffers buffers_;
  std::vector<Output> returned_;  ///< tensors, where another call may continue this one
  std::vector<Entry> entries_;
  std::vector<std::optional<uint32_t>> versions_;  ///< of the module's parameters and buffers; of a buffer that its forward writes, none
};

}  // namespace tessera
