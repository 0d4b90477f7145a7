#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

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

/// How often each parameter was written by operators, or given other memory (set_data), since the last take(), as one number, for ranks to compare: an
/// optimizer writes as often on all. Writes through data() and by pointers do not show.
class WriteCounts {
 public:
  uint64_t take(const std::vector<NamedParameter>& parameters);

 private:
  struct Seen {
    int64_t version;
    const void* memory;
  };
  std::vector<Seen> seen_;
};

}  // namespace tessera::nn
