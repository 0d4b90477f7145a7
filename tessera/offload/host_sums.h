#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>

#include "tessera/memory/host_link.h"
#include "tessera/nn/gradient_relay.h"

namespace tessera {

/// Sums of gradients on the host beside the device. A technique that is given one as its `relay` hands it each gradient as it comes, and HostGradients makes
/// what is left in the end the gradients of an update.
///
///   device    gradients on their way out: at most `in_flight_bytes` of them, or one; one that comes back
///   host      the sums, and what is on its way
///
/// Works on meta.
class HostSums final : public GradientRelay {
 public:
  HostSums(at::Device device, int64_t in_flight_bytes);

  void keep(const at::Tensor& tensor, const at::Tensor& gradient) override;
  void add_kept(const at::Tensor& tensor, const at::Tensor& sum) override;

  /// What is kept for `tensor`, from now on the caller's; undefined where nothing is.
  at::Tensor take(const at::Tensor& tensor);

  /// Forgets everything: of a step that failed, too.
  void clear();

  const HostLink& link() const { return link_; }

 private:
  using Key = const c10::TensorImpl*;

  /// A gradient on its way.
  struct Flight {
    Key key;
    at::Tensor gradient;  ///< on the host
    CopyStream::Point arrived;
  };
  void land();

  HostLink link_;
  int64_t in_flight_bytes_;
  std::deque<Flight> flights_;
  int64_t flying_bytes_ = 0;
  std::unordered_map<Key, at::Tensor> sums_;
};

}  // namespace tessera
