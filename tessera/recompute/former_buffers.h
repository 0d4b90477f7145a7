#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <torch/nn/module.h>

#include "tessera/nn/operators.h"

namespace tessera {

/// What a forward pass found in those of a module's buffers that it writes (running statistics, vectors of a power iteration). The pass made again finds it
/// there once more, and leaves the buffers as they were: other passes may have written them since.
class FormerBuffers {
 public:
  /// Before the pass. `path` of the module, for messages. `module` outlives this.
  FormerBuffers(const torch::nn::Module& module, std::string path);

  bool has_any() const { return !buffers_.empty(); }

  /// Watches the first pass: keeps a copy of a buffer that an operator is about to write. Lives shorter than this.
  std::shared_ptr<nn::OperatorHooks> recorder();
  /// In the first pass, before a tensor is saved.
  void before_saving();
  /// Of the copies that it has made by now.
  int64_t copied_bytes() const;
  /// After the first pass. Throws ConfigError where a buffer was written past the operators. Copies are no saved tensors: a pass made again around this one
  /// would save as many only if it wrote as often. A buffer that was given memory of another size is a table that has grown, which the second pass finds grown.
  void forward_done();
  /// After that: whether the first pass wrote this buffer.
  bool wrote(const at::Tensor& buffer) const;

  /// While alive, the buffers that the first pass wrote hold what it found. Afterwards they hold what they did, and count as not written. Throws ConfigError
  /// where what the first pass left in a buffer is needed, and was written since.
  class Guard {
   public:
    explicit Guard(FormerBuffers& buffers);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    struct Held;
    std::vector<Held> held_;
  };

  /// Watches the second pass, with a Guard alive. Throws ConfigError where it writes a buffer that the first one did not. Lives shorter than this.
  std::shared_ptr<nn::OperatorHooks> replayer();
  /// In the second pass, before tensor `index` is saved: whether there is a buffer that the first pass had written by then, and this one has not. Such a buffer
  /// is made once, or under a condition that lies outside of the buffers. The next Guard leaves what the first pass left there.
  bool leaves_unwritten(size_t index);

  /// Whether it lies on the memory of a buffer that the first pass wrote.
  bool share_memory_with(const at::Tensor& tensor) const;

 private:
  class Recorder;
  class Replayer;
  using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;  ///< a name to compare, whose address is given to no other while this lives

  struct Buffer {
    at::Tensor tensor;
    at::Tensor before;  ///< alias of what the pass finds; until forward_done
    at::Tensor copy{};  ///< from before the first write; until forward_done
    Memory memory;      ///< before the pass
    int64_t version;
    size_t written_at = std::numeric_limits<size_t>::max();  ///< so many tensors had been saved by the first write
    at::Tensor former{};                                     ///< undefined: not written
    Memory memory_after{c10::intrusive_ptr<c10::StorageImpl>()};
    int64_t version_after = 0;
    bool left = false;                        ///< not written by the second pass, which finds it as the first one left it
    bool again = false;                       ///< written by the second pass
    const c10::StorageImpl* given = nullptr;  ///< its memory when the second pass began
  };

  static Memory memory_of(const at::Tensor& tensor);
  template <class Visit>
  void for_each_write(const nn::OperatorCall& operation, Visit&& visit);
  std::string name_of(const Buffer& buffer) const;
  std::string where() const;

  const torch::nn::Module& module_;
  std::string path_;
  std::vector<Buffer> buffers_;
  size_t saved_ = 0;  ///< tensors, in the first pass
};

}  // namespace tessera
