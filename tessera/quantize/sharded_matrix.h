#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"
#include "tessera/kernels/quantized_linear.h"

namespace tessera::quantize {

/// A matrix in fewer bits whose rows are dealt over ranks, and gathered for each product (FSDP with QLoRA). Of n ranks each keeps ceil(rows / n) rows' codes
/// and scales, padded so that all take the same bytes; runs of 256 scales share numbers that every rank keeps (0.002 bits an element).
class ShardedMatrix {
 public:
  /// Of `whole`, of which all ranks of the group would hold the same.
  ShardedMatrix(const kernels::QuantizedMatrix& whole, const comm::Group& group);

  /// All rows, in memory of their own, once `arrived` has been waited for.
  struct Gathered {
    std::shared_ptr<const kernels::QuantizedMatrix> matrix;
    comm::Pending arrived;
  };
  /// Collective: an all_gather of a rank's codes and scales, B bytes of the matrix in all: a rank sends B (n-1)/n. Throws CommError, here or from the wait.
  Gathered gather() const;

  int64_t rows() const;   ///< that are kept here, without padding
  int64_t bytes() const;  ///< that are kept here

 private:
  /// Codes and scales of `records`, which are rows of both.
  kernels::QuantizedMatrix over(const at::Tensor& records) const;

  comm::Group group_;
  kernels::QuantizedMatrix frame_;  ///< the whole's form, part and what all ranks keep; no codes
  int64_t code_bytes_, code_room_;  ///< of a row; with what keeps scales aligned
  int64_t scales_;                  ///< of a row
  int64_t share_;                   ///< rows of a rank, padding included
  at::Tensor records_;              ///< uint8 [share_, bytes of a row]
};

}  // namespace tessera::quantize
