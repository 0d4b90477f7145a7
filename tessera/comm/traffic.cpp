#include "tessera/comm/traffic.h"

#include "tessera/core/error.h"

namespace tessera::comm {

Traffic traffic(std::string_view op, int ranks, int64_t bytes) {
  if (ranks == 1) return {};
  const int others = ranks - 1;
  const int64_t part = bytes / ranks;  // the recorder's bytes are a multiple of `ranks` wherever parts are equal
  if (op == "all_reduce") return {2 * others, 2 * bytes * others / ranks};
  if (op == "all_gather" || op == "reduce_scatter" || op == "all_to_all" || op == "scatter") return {others, others * part};
  if (op == "broadcast" || op == "reduce") return {others, bytes};
  if (op == "gather") return {1, part};
  if (op == "send") return {1, bytes};
  if (op == "recv" || op == "barrier") return {1, 0};
  throw InternalError(detail::concat("internal error: traffic of an unknown collective, ", op));
}

}  // namespace tessera::comm
