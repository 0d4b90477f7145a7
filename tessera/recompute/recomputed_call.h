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
  /// Makes the call. `keep`: operators whose outputs are kept; null: none.
  static nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next, std::shared_ptr<const std::set<std::string>> keep);

  RecomputedCall(nn::Module& module, const nn::Values& inputs, const nn::Next& next, std::shared_ptr<const std::set<std::string>> keep);

 private:
  class Slot;
  class Dropper;
  class Filler;

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

  at::Tensor unpack(size_t index);
  void compute_again();
  void note_state(std::vector<std::optional<uint32_t>>& versions) const;
  void forward_done();
  void refuse_written() const;
  [[noreturn]] void refuse(size_t index, const std::string& found) const;

  std::shared_ptr<torch::nn::Module> module_;
  std::string path_;
  nn::Next next_;
  KeptValues inputs_;
  ThreadState state_;
  std::optional<KeptOutputs> outputs_;
  std::vector<Entry> entries_;
  std::vector<std::optional<uint32_t>> versions_;  ///< of the module's parameters and buffers; of a buffer that its forward writes, none
};

}  // namespace tessera
