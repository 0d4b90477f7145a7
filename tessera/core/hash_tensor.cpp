#include "tessera/core/hash_tensor.h"

#include <algorithm>
#include <vector>

#include "tessera/core/hash.h"
#include "tessera/core/parallel.h"

namespace tessera {

uint64_t hash_of_values(const at::Tensor& tensor) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
  const auto* const bytes = static_cast<const char*>(values.const_data_ptr());
  const auto size = static_cast<int64_t>(values.nbytes());
  std::vector<uint64_t> pieces(static_cast<size_t>((size + kPiece - 1) / kPiece));
  parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      pieces[static_cast<size_t>(i)] = hash_bytes(bytes + i * kPiece, static_cast<size_t>(std::min(kPiece, size - i * kPiece)));
  });
  return hash_bytes(pieces.data(), pieces.size() * sizeof(uint64_t));
}

}  // namespace tessera
