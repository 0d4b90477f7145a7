#include "tessera/core/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>

#include <ATen/Parallel.h>

// The OpenMP runtime that libtorch is linked to, called by its ABI: a compiler's -fopenmp would bring its own runtime, hence a second pool on the same cores.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* context, unsigned num_threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_in_parallel(void);
}

namespace tessera {
namespace {

struct Region {
  int64_t begin, end, parts;
  void (*body)(void*, int64_t, int64_t);
  void* context;
  std::atomic<bool> failed = false;
  std::exception_ptr error = nullptr;

  void run_part(int64_t part) {
    const int64_t count = end - begin, base = count / parts, extra = count % parts;
    const int64_t first = begin + part * base + std::min(part, extra);
    try {
      body(context, first, first + base + (part < extra ? 1 : 0));
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
};

void enter(void* argument) {
  auto& region = *static_cast<Region*>(argument);
  const int thread = omp_get_thread_num();
  const at::internal::ThreadIdGuard thread_id(thread);
  // The runtime may give fewer threads than asked for; the parts stay the same.
  for (int64_t part = thread; part < region.parts; part += omp_get_num_threads()) region.run_part(part);
}

}  // namespace

bool in_parallel_region() { return omp_in_parallel() != 0; }

void detail::run_parallel(int64_t begin, int64_t end, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context) {
  const int64_t most = (end - begin) / std::max<int64_t>(grain, 1);
  const int64_t parts = in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), most);
  if (parts <= 1) return body(context, begin, end);
  Region region{begin, end, parts, body, context};
  // 0 threads means the pool's own size. Asking for fewer would make libgomp end the others and start them again for the next operator.
  GOMP_parallel(enter, &region, 0, 0);
  if (region.error) std::rethrow_exception(region.error);
}

}  // namespace tessera
