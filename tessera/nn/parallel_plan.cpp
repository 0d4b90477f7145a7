#include "tessera/nn/parallel_plan.h"

#include <array>
#include <string_view>

namespace tessera {

const char* to_string(TensorLayout layout) {
  static constexpr std::array names{"replicated", "copied", "sharded on features", "sharded on sequence", "a partial sum"};
  return names[static_cast<size_t>(layout)];
}

std::string to_string(const ParallelStyle& style) {
  static constexpr std::array names{"ColumnParallel",   "RowParallel",  "VocabParallelEmbedding", "VocabParallelHead",
                                    "SequenceParallel", "PrepareInput", "PrepareOutput",          "Gives"};
  static_assert(names.size() == std::variant_size_v<ParallelStyle>);
  return names[style.index()];
}

}  // namespace tessera
