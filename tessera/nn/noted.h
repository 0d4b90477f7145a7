#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::nn {

using NotedValue = std::shared_ptr<const void>;  ///< whose type they know who note it

/// What a forward pass makes of what is not in its inputs (numbers that are drawn, choices between numbers that a rounding may turn), so that a pass that is
/// made again is given the first one's. Per thread. Of uint64_t, at::Tensor and NotedValue (noted.cpp).
template <class T>
class Noted {
 public:
  using Values = std::vector<T>;

  /// `make()`, or, while a record is given again, what was made the first time.
  static T next(const std::function<T()>& make);

  /// Notes what this thread makes until `end`.
  class Record {
   public:
    Record();
    void end();

   private:
    friend class Noted;
    std::shared_ptr<Values> values_;
  };

  /// While alive, this thread is given the values of a record again, in their order, and then makes its own.
  class Replay {
   public:
    explicit Replay(const Record& record);
    ~Replay();
    Replay(const Replay&) = delete;
    Replay& operator=(const Replay&) = delete;

   private:
    friend class Noted;
    std::shared_ptr<const Values> values_;
    size_t used_ = 0;
    Replay* outer_;
    std::vector<std::weak_ptr<Values>> outer_records_;
  };
};

extern template class Noted<uint64_t>;
extern template class Noted<at::Tensor>;
extern template class Noted<NotedValue>;

}  // namespace tessera::nn
