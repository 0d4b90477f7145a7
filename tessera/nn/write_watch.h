#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/nn/parameter.h"

/// What a program has written where memory was laid out, or between two backward passes of one step. Not part of the public surface.
namespace tessera::nn {

/// What became of the gradients that a pass left. zero_grad(set_to_none = false) zeros them in place, of an optimizer by the tensor itself, of a module by an
/// alias of it that takes its place.
class GradientWrites {
 public:
  explicit GradientWrites(size_t parameters) : seen_(parameters) {}

  /// This is the gradient now.
  void see(size_t index, const at::Tensor& gradient);
  /// Whether it is the one that was seen, as it was.
  bool is(size_t index, const at::Tensor& gradient) const;
  /// Whether somebody has written it since, or put another in its place. False for one that was not seen, or is none.
  bool written(size_t index, const at::Tensor& gradient) const;
  /// Whether that made it zero. Where it was written, it is read (a synchronization with a GPU).
  bool zeroed(size_t index, const at::Tensor& gradient) const;
  /// Whether the program has cleared the parameter's gradient since, in either way. Throws ConfigError where it has changed it otherwise.
  bool cleared(size_t index, const NamedParameter& parameter, const std::string& technique) const;

 private:
  struct Seen {
    const void* tensor = nullptr;
    int64_t version = 0;
  };
  std::vector<Seen> seen_;
};

/// Shapes, dtypes and devices of parameters, as memory was laid out for them and their gradients.
class ParameterForms {
 public:
  explicit ParameterForms(const std::vector<NamedParameter>& parameters);
  /// Throws ConfigError, by name and with both forms, where parameter `index` has another one now.
  void require_same(const std::string& technique, size_t index, const NamedParameter& parameter) const;
  void require_same(const std::string& technique, const std::vector<NamedParameter>& parameters) const;

 private:
  struct Form {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
  };
  std::vector<Form> forms_;
};

/// Whether parameters were written. libtorch's optimizers write behind the version's back (Tensor::data), so a few elements are compared besides.
class ParameterWrites {
 public:
  /// These are the parameters now, those of `which`; no effect where they are marked already.
  void mark(const std::vector<NamedParameter>& parameters, const std::vector<bool>& which);
  void clear() { marks_.clear(), device_samples_.clear(); }
  /// The first that was written since, as far as the host sees without a wait: of elements those on the CPU alone. Empty where none was, or none is marked.
  std::string first_written(const std::vector<NamedParameter>& parameters) const;
  /// Whether elements are others since. For those on a device a read on the host, where any are marked: to be asked where it waits for the device anyway.
  bool changed(const std::vector<NamedParameter>& parameters) const;

 private:
  static constexpr int64_t kSamples = 16;
  struct Mark {
    size_t index;
    int64_t version;
    std::array<uint64_t, kSamples> samples;
  };
  static std::array<uint64_t, kSamples> samples_of(const at::Tensor& tensor);
  std::map<std::string, at::Tensor> device_samples_of(const std::vector<NamedParameter>& parameters) const;

  std::vector<Mark> marks_;
  std::map<std::string, at::Tensor> device_samples_;  ///< by device, the bytes of all that are marked there
};

inline constexpr const char* kUnlikeWrites =
    "some ranks wrote parameters more often than others since the last step that all completed: a forward that makes its weights of the first batch it sees, "
    "say, or values that one rank alone loads. Write the same on every rank, or broadcast what one has written (ReplicaStart::Trust: who writes parameters "
    "there vouches)";

/// How often parameters were written by operators, or given other memory (set_data), between steps of the plain loop, for ranks that hold the same to compare:
/// an optimizer writes as often on all. Writes through data() and by pointers do not show.
class WriteCounts {
 public:
  /// What shows that a parameter was written. By default: of what is not to be looked at.
  struct Seen {
    int64_t version = 0;
    const void* memory = nullptr;
  };
  static Seen of(const at::Tensor& parameter);

  /// Ranks of `replicas` hold the same, those of `shard` other parts.
  WriteCounts(std::string technique, comm::Group replicas, comm::Group shard = comm::Group::self());

  /// As one number, since the last time, and of all times since settle(): what was told in a step that failed is told again.
  uint64_t take(std::vector<Seen> now);
  /// Where numbers were unlike: refuses what the replicas do not hold alike of `parts` (compare_replicas), on all ranks of `shard`. Traffic: as that, and an
  /// all-reduce of a word over `shard`.
  void compare(const std::vector<NamedParameter>& parts, const std::string& reason = kUnlikeWrites) const;
  /// Numbers were alike, or (`unlike`) replicas equal. Where that is so in each step, the first rank tells once how not to pay for it.
  void settle(bool unlike);

 private:
  std::string technique_;
  comm::Group replicas_, shard_;
  std::vector<Seen> seen_;
  uint64_t taken_ = 0;
  int unlike_in_a_row_ = 0;  ///< settled so
};

}  // namespace tessera::nn
