#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace tessera {

namespace detail {
/// Runs body(context, begin, end) on contiguous parts of [begin, end), one part per thread.
void run_parallel(int64_t begin, int64_t end, int64_t grain, void (*body)(void* context, int64_t begin, int64_t end), void* context);
}  // namespace detail

/// Calls f(first, last) on contiguous parts that together are [begin, end), each of at least `grain` elements, on the thread pool that libtorch's own
/// operators use: at most at::get_num_threads() threads; on the calling thread alone when there is one part or the caller is already inside a parallel region.
/// The parts differ by at most one element and depend only on the range, the grain and the number of threads. The first exception is rethrown after all parts
/// ended.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, F&& f) {
  if (begin >= end) return;
  using Function = std::remove_reference_t<F>;
  detail::run_parallel(
      begin, end, grain, [](void* context, int64_t first, int64_t last) { (*static_cast<Function*>(context))(first, last); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

/// Whether the calling thread works for a parallel region now (then parallel_for runs serially).
bool in_parallel_region();

}  // namespace tessera
