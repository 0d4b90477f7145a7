#pragma once

#include <string>
#include <vector>

#include <ATen/record_function.h>

namespace tessera {

/// Knows, while alive, which operator this thread is in, for messages: the innermost that has begun, or, between two, the one that ended last (a fused operator
/// of ours saves its tensors after it has run).
class OperatorTrace {
 public:
  OperatorTrace();
  ~OperatorTrace();
  OperatorTrace(const OperatorTrace&) = delete;
  OperatorTrace& operator=(const OperatorTrace&) = delete;

  /// Such as "aten::mm"; "no operator" before the first.
  std::string current() const;

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& operation);
  static void end(const at::RecordFunction& operation, at::ObserverContext* context);

  std::vector<std::string> open_;
  std::string last_;
  OperatorTrace* outer_;
  at::CallbackHandle handle_;
};

}  // namespace tessera
