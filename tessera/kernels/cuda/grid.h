#pragma once

#include <cstdint>

#include "tessera/core/error.h"
#include "tessera/kernels/routines.h"

/// How launches are cut into blocks of threads. CUDA takes 2^31 - 1 of them along x and 65,535 along y, so whatever goes up with tokens or elements lies along
/// x. Nothing here needs CUDA.
namespace tessera::kernels::cuda {

constexpr int kThreads = 256;
constexpr int64_t kMostAlongX = 2147483647, kMostAlongY = 65535;

/// Of a thread for each element, along x.
inline unsigned blocks_for(int64_t elements) {
  const int64_t blocks = (elements + kThreads - 1) / kThreads;
  require(blocks <= kMostAlongX, "a CUDA kernel was given ", elements, " elements, more than one launch has threads for; give it fewer rows at once");
  return static_cast<unsigned>(blocks);
}

/// Blocks of rows along x, of columns along y.
struct Grid {
  unsigned x, y;
};

/// Of a thread for each column of kRmsNormBlock rows. Throws ConfigError for rows of more than 16,776,960 columns.
inline Grid grid_of_columns(int64_t rows, int64_t columns) {
  const int64_t of_rows = (rows + kRmsNormBlock - 1) / kRmsNormBlock, of_columns = (columns + kThreads - 1) / kThreads;
  require(of_rows <= kMostAlongX && of_columns <= kMostAlongY, "the gradient of a norm's weight or of a bias over [", rows, ", ", columns,
          "] on a CUDA device: one launch has threads for ", kMostAlongX, " x ", kRmsNormBlock, " rows of ", kMostAlongY * kThreads,
          " columns; run.kernels = \"reference\" has no such limit");
  return {static_cast<unsigned>(of_rows), static_cast<unsigned>(of_columns)};
}

}  // namespace tessera::kernels::cuda
