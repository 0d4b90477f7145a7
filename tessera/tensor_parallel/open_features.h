#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>

#include "tessera/comm/group.h"
#include "tessera/layout/feature_cut.h"
#include "tessera/nn/interceptor.h"

namespace tessera::tensor_parallel {

struct Context;

/// What column-wise layers gave, and which tensors are made of it. What nobody can tell is said to be unknown. One rank, one thread; holds no tensor and no
/// graph.
class OpenFeatures {
 public:
  /// `takers`: row-wise layers that take features as they come, by their paths, and how many there are in all.
  OpenFeatures(comm::Group group, std::map<std::string, int64_t> takers) : group_(std::move(group)), takers_(std::move(takers)) {}

  /// Of which of all features a tensor is.
  struct Block {
    int64_t first = 0, all = 0;
    bool by_rank = false;    ///< of some that its last dimension does not show; then `first` is who holds them, of `all` ranks
    std::string unknown_of;  ///< the layer whose features it may be a part of, or all ranks' alike; empty where it is known
    bool operator==(const Block&) const = default;
  };

  /// The column-wise layer `path` gave `output`, this rank's share.
  void open(const std::string& path, const at::Tensor& output, const std::vector<FeatureShare>& shares);
  /// A row-wise layer took features, and gave `output`.
  void close(const at::Tensor& output);
  /// A column-wise layer takes it: it is of all features.
  void note_whole(const at::Tensor& input);

  /// Of what module `path` is given; nothing where it is not made of features. The graph tells, of what it knows. Of a tensor without one (a stage's of a
  /// pipeline) a recording of the pass does. Else what of this pass lies beside the module: where no graph was recorded and no row-wise layer was called since,
  /// it is the layer's; what might be after that is unknown. Where its last dimension has the features, that is as long, and there are no more dimensions or
  /// rows than the layer gave.
  std::optional<Block> find(const std::string& path, const at::Tensor& x);

 private:
  using Node = torch::autograd::Node;
  using WeakNode = c10::weak_intrusive_ptr<Node>;
  using Output = std::pair<const Node*, uint32_t>;            ///< one of a node's
  using Pass = std::tuple<uint64_t, int64_t, int64_t, bool>;  ///< seed, step, first sample, on meta: as a rule one, or its repetition
  struct Opened {
    std::string path;
    std::map<Output, WeakNode> origins;  ///< of the output, and of what it is a view of (a write in place is noted there); none where no graph is recorded
    uint64_t since;                      ///< what nodes are numbered from
    Pass pass;
    std::vector<int64_t> sizes;
    FeatureShare share;
    std::set<int64_t> widths;  ///< of all ranks' shares
    int64_t all;
    bool taken = false;

    bool is_alive() const;
    bool may_show_in(const at::Tensor& x) const;
    bool is_exceeded_by(const at::Tensor& x) const;
    bool shows_all(const Node& node, uint32_t place) const;
    bool is_brought_together_by(const comm::Group& group, const Node& node) const;
    bool is_share_of_all(const Node& node, uint32_t place) const;
    bool is_parted_by(const comm::Group& group, const Node& node, uint32_t place) const;
  };
  enum class Made : char { Otherwise, OfFeatures, OfFeaturesOrAll };

  /// What the graph of a tensor comes from, up to the nearest layers.
  struct Behind {
    std::set<const Opened*> layers;
    bool is_bound = false;         ///< it is itself what a row-wise layer gave, or a column-wise one takes
    bool is_whole = false;         ///< so is something there, or parameters alone are
    uint64_t oldest = UINT64_MAX;  ///< node
  };

  static Pass pass_of(const at::Tensor& tensor);
  Behind behind(const at::Tensor& x) const;
  Made made_of(const Opened& one, const at::Tensor& x) const;
  Made made_without_graph(const Opened& one, const std::string& path, const at::Tensor& x) const;
  std::optional<Block> found(const std::string& path, const at::Tensor& x, const Behind& behind) const;

  comm::Group group_;
  std::map<std::string, int64_t> takers_;
  std::vector<Opened> opened_;
  std::map<Output, WeakNode> bounds_;  ///< of what row-wise layers gave: what lies behind is not of features any more
  std::map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> wholes_;  ///< that, and what column-wise layers take
  std::map<std::string, std::optional<Block>> recorded_;                                 ///< of modules, what they were given in a pass on meta
};

/// Around a Dropout: masks of features that are cut are those of one device.
std::shared_ptr<nn::Interceptor> drop_features(std::shared_ptr<Context> context);

}  // namespace tessera::tensor_parallel
