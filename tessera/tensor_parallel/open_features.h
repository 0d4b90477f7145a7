#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include "tessera/comm/group.h"
#include "tessera/layout/feature_cut.h"
#include "tessera/nn/interceptor.h"

namespace tessera::tensor_parallel {

struct Context;

/// What column-wise layers gave and no row-wise layer has taken yet, nor a collective of the program brought together: of which features the tensors between
/// the two are. One rank, one thread; holds no tensor and no graph.
class OpenFeatures {
 public:
  /// `takers`: row-wise layers that take features as they come, by their paths, and how many there are in all.
  OpenFeatures(comm::Group group, std::map<std::string, int64_t> takers) : group_(std::move(group)), takers_(std::move(takers)) {}

  /// Of which of all features a tensor is.
  struct Block {
    int64_t first = 0, all = 0;
    bool by_rank = false;    ///< of some that its last dimension does not show; then `first` is who holds them, of `all` ranks
    std::string unknown_of;  ///< the layer whose features it may be a part of, or all ranks' alike; empty where it is known
  };

  /// The column-wise layer `path` gave `output`, this rank's share.
  void open(const std::string& path, const at::Tensor& output, const std::vector<FeatureShare>& shares);
  /// A row-wise layer takes `input`, and gave `output`.
  void close(const at::Tensor& input);
  void bound(const at::Tensor& output);

  /// Of what module `path` is given; nothing where it is not made of features that are open. Where a graph is recorded it tells; without one the module has to
  /// lie beside the layer, and a row-wise layer that takes its features near it. Where its last dimension has them, that is as long, and there are no more
  /// dimensions or rows than the layer gave.
  std::optional<Block> find(const std::string& path, const at::Tensor& x) const;

 private:
  using Node = torch::autograd::Node;
  using WeakNode = c10::weak_intrusive_ptr<Node>;
  struct Opened {
    std::string path;
    std::optional<WeakNode> node;  ///< of the output, where a graph is recorded
    std::vector<int64_t> sizes;
    FeatureShare share;
    int64_t all;
    bool taken = false;

    bool may_show_in(const at::Tensor& x) const;
    bool is_exceeded_by(const at::Tensor& x) const;
    bool is_brought_together_by(const Node& node) const;
    bool is_share_of_all(const Node& node, uint32_t place) const;
    bool is_parted_by(const comm::Group& group, const Node& node, uint32_t place) const;
  };
  enum class Made : char { Otherwise, OfFeatures, OfFeaturesOrAll };

  Made made_of(const Opened& one, const at::Tensor& x) const;
  Made made_without_graph(const Opened& one, const std::string& path, const at::Tensor& x) const;

  comm::Group group_;
  std::map<std::string, int64_t> takers_;
  std::vector<Opened> opened_;
  std::vector<WeakNode> bounds_;  ///< of what row-wise layers gave: what lies behind is not of features any more
};

/// Around a Dropout: masks of features that are cut are those of one device.
std::shared_ptr<nn::Interceptor> drop_features(std::shared_ptr<Context> context);

}  // namespace tessera::tensor_parallel
