#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::checkpoint {

/// The largest finite magnitude of `sources`, where `target`, which was copied from them (or from parts of them), holds infinities because its format ends
/// below it: of fp16 above 65504. Nothing where it holds none, or where `sources` are as wide.
std::optional<double> beyond_range(const at::Tensor& target, const std::vector<at::Tensor>& sources);

/// Throws ConfigError for such a copy: `tensor` and its largest value, what `knob` (such as "precision.params = fp16") holds, and `way_out`.
void refuse_beyond_range(const at::Tensor& target, const std::vector<at::Tensor>& sources, const std::string& place, const std::string& tensor,
                         const std::string& knob, const std::string& way_out);

/// As precision.params (of bf16, precision.master and optim.state_dtype, too) narrows what is read.
void refuse_beyond_params(const at::Tensor& target, const std::vector<at::Tensor>& sources, const std::string& place, const std::string& tensor);

/// As `tessera convert --dtype`, or the format that is stored, narrows what is written.
void refuse_beyond_dtype(const at::Tensor& target, const std::vector<at::Tensor>& sources, const std::string& place, const std::string& tensor);

}  // namespace tessera::checkpoint
