#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// What a forward pass decides by comparing numbers, as a router chooses experts. Made again, on a device whose sums have no fixed order, the numbers may
/// differ by a rounding and the decision altogether; so a pass that is made again is given the first one's. Per thread, as MaskKeys.
class Decisions {
 public:
  using Made = std::vector<at::Tensor>;

  /// What this pass decides: `decide()`, or, while a record is given again, what was decided the first time. The tensor must not be written to.
  static at::Tensor make(const std::function<at::Tensor()>& decide);

  /// Notes what this thread decides until `end`.
  class Record {
   public:
    Record();
    void end();

   private:
    friend class Decisions;
    std::shared_ptr<Made> made_;
  };

  /// While alive, this thread is given the decisions of a record again, in their order, and then makes its own.
  class Replay {
   public:
    explicit Replay(const Record& record);
    ~Replay();
    Replay(const Replay&) = delete;
    Replay& operator=(const Replay&) = delete;

   private:
    friend class Decisions;
    std::shared_ptr<const Made> made_;
    size_t used_ = 0;
    Replay* outer_;
    std::vector<std::weak_ptr<Made>> outer_records_;
  };
};

}  // namespace tessera::nn
