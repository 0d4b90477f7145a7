#include "tessera/kernels/cuda/common.cuh"
#include "tessera/kernels/cuda/routines.cuh"

namespace tessera::kernels::cuda {

namespace {

__device__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

__device__ bool is_taken(const int64_t* taken, int64_t count, int64_t expert) {
  for (int64_t i = 0; i < count; ++i) {
    if (taken[i] == expert) return true;
  }
  return false;
}

/// A thread per token.
__global__ void choose_kernel(int64_t tokens, int64_t* chosen, const float* scores, int64_t experts, int64_t k) {
  const int64_t token = thread_index();
  if (token >= tokens) return;
  const float* score = scores + token * experts;
  int64_t* taken = chosen + token * k;
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = -1;
    for (int64_t expert = 0; expert < experts; ++expert) {
      if ((best < 0 || score[expert] > score[best]) && !is_taken(taken, i, expert)) best = expert;
    }
    taken[i] = best;
  }
}

/// A block per expert: its threads take chunks of the choices and hand each other how many came before. `first` says which choices are looked at first: by
/// column for whom a capacity drops, by token for places.
__device__ int64_t choice_at(int64_t i, int64_t tokens, int64_t choices, bool by_column) { return by_column ? i % tokens * choices + i / tokens : i; }

/// How many of the threads before this one have `mine`; `total` of all.
__device__ int64_t before_me(int64_t mine, int64_t& total) {
  __shared__ int64_t sums[kThreads];
  sums[threadIdx.x] = mine;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int64_t other = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += other;
    __syncthreads();
  }
  const int64_t before = sums[threadIdx.x] - mine;
  total = sums[kThreads - 1];
  __syncthreads();
  return before;
}

/// slots <- 0 for choices that are kept, -1 for others; counts.
__global__ void keep_kernel(int64_t tokens, int64_t choices, int64_t* slots, int64_t* counts, const int64_t* chosen, int64_t capacity) {
  const int64_t expert = blockIdx.x, n = tokens * choices, each = (n + kThreads - 1) / kThreads;
  const int64_t begin = min(n, each * threadIdx.x), end = min(n, begin + each);
  int64_t mine = 0, total = 0;
  for (int64_t i = begin; i < end; ++i) mine += chosen[choice_at(i, tokens, choices, true)] == expert;
  int64_t rank = before_me(mine, total);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t c = choice_at(i, tokens, choices, true);
    if (chosen[c] != expert) continue;
    slots[c] = rank++ < capacity ? 0 : -1;
  }
  if (threadIdx.x == 0) counts[expert] = min(total, capacity);
}

__global__ void nothing_chosen_kernel(int64_t n, int64_t* slots, const int64_t* chosen, int64_t experts) {
  const int64_t i = thread_index();
  if (i >= n) return;
  CUDA_KERNEL_ASSERT(chosen[i] >= -1 && chosen[i] < experts);
  if (chosen[i] < 0) slots[i] = -1;
}

__global__ void place_kernel(int64_t tokens, int64_t choices, int64_t* slots, int64_t* order, int64_t places, const int64_t* counts, const int64_t* chosen) {
  const int64_t expert = blockIdx.x, n = tokens * choices, each = (n + kThreads - 1) / kThreads;
  const int64_t begin = min(n, each * threadIdx.x), end = min(n, begin + each);
  int64_t first = 0, mine = 0, total = 0;
  for (int64_t e = 0; e < expert; ++e) first += counts[e];
  for (int64_t c = begin; c < end; ++c) mine += chosen[c] == expert && slots[c] >= 0;
  int64_t place = first + before_me(mine, total);
  for (int64_t c = begin; c < end; ++c) {
    if (chosen[c] != expert || slots[c] < 0) continue;
    CUDA_KERNEL_ASSERT(place < places);
    order[place] = c;
    slots[c] = place++;
  }
}

__global__ void empty_kernel(int64_t places, int64_t* order, const int64_t* counts, int64_t experts) {
  const int64_t place = thread_index();
  if (place >= places) return;
  int64_t used = 0;
  for (int64_t e = 0; e < experts; ++e) used += counts[e];
  if (place >= used) order[place] = -1;
}

/// A block per row.
template <class T>
__global__ void gather_kernel(T* out, const T* x, const int64_t* order, const float* weights, int64_t choices, int64_t stride, int64_t dim) {
  const int64_t choice = order[blockIdx.x];
  const float weight = choice < 0 ? 0.0f : weights == nullptr ? 1.0f : weights[choice];
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    store(out, blockIdx.x * dim + i, choice < 0 ? 0.0f : weight * load(x, choice / choices * stride + i));
  }
}

template <class T>
__global__ void combine_kernel(T* out, const T* rows, const int64_t* slots, const float* weights, int64_t choices, int64_t stride, int64_t dim) {
  const int64_t token = blockIdx.x;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    float sum = 0;
    for (int64_t k = 0; k < choices; ++k) {
      const int64_t slot = slots[token * choices + k];
      if (slot < 0) continue;
      const float row = load(rows, slot * stride + i);
      sum += weights == nullptr ? row : row * weights[token * choices + k];
    }
    store(out, token * dim + i, sum);
  }
}

/// A block per choice.
template <class T>
__global__ void weigh_kernel(float* out, const T* rows, const T* grad, const int64_t* slots, int64_t choices, int64_t stride, int64_t grad_stride,
                             int64_t dim) {
  const int64_t slot = slots[blockIdx.x], token = blockIdx.x / choices;
  float product = 0;
  for (int64_t i = threadIdx.x; slot >= 0 && i < dim; i += kThreads) product += load(rows, slot * stride + i) * load(grad, token * grad_stride + i);
  product = sum_block(product);
  if (threadIdx.x == 0) out[blockIdx.x] = product;
}

auto stream() { return c10::cuda::getCurrentCUDAStream(); }
unsigned count_of(int64_t n) { return static_cast<unsigned>(n); }
const float* weights_of(const at::Tensor& weights) { return weights.defined() ? weights.const_data_ptr<float>() : nullptr; }

void choose(const at::Tensor& chosen, const at::Tensor& scores) {
  choose_kernel<<<blocks_for(chosen.size(0)), kThreads, 0, stream()>>>(chosen.size(0), chosen.data_ptr<int64_t>(), scores.const_data_ptr<float>(),
                                                                       scores.size(1), chosen.size(1));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void plan(const at::Tensor& slots, const at::Tensor& order, const at::Tensor& counts, const at::Tensor& chosen, int64_t capacity) {
  const int64_t tokens = chosen.size(0), choices = chosen.size(1), experts = counts.size(0), n = tokens * choices;
  auto* const slot = slots.data_ptr<int64_t>();
  auto* const count = counts.data_ptr<int64_t>();
  const auto* const expert = chosen.const_data_ptr<int64_t>();
  keep_kernel<<<count_of(experts), kThreads, 0, stream()>>>(tokens, choices, slot, count, expert, capacity);
  if (n > 0) nothing_chosen_kernel<<<blocks_for(n), kThreads, 0, stream()>>>(n, slot, expert, experts);
  if (order.numel() > 0) empty_kernel<<<blocks_for(order.numel()), kThreads, 0, stream()>>>(order.numel(), order.data_ptr<int64_t>(), count, experts);
  place_kernel<<<count_of(experts), kThreads, 0, stream()>>>(tokens, choices, slot, order.data_ptr<int64_t>(), order.numel(), count, expert);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void gather(const at::Tensor& out, const at::Tensor& x, const at::Tensor& order, int64_t k, const at::Tensor& weights) {
  with_type(x.scalar_type(), [&](auto t) {
    using T = decltype(t);
    gather_kernel<<<count_of(out.size(0)), kThreads, 0, stream()>>>(out.data_ptr<T>(), x.const_data_ptr<T>(), order.const_data_ptr<int64_t>(),
                                                                    weights_of(weights), k, x.stride(0), x.size(1));
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void combine(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& slots, const at::Tensor& weights) {
  with_type(rows.scalar_type(), [&](auto t) {
    using T = decltype(t);
    combine_kernel<<<count_of(out.size(0)), kThreads, 0, stream()>>>(out.data_ptr<T>(), rows.const_data_ptr<T>(), slots.const_data_ptr<int64_t>(),
                                                                     weights_of(weights), slots.size(1), rows.stride(0), rows.size(1));
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void weigh(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& grad, const at::Tensor& slots) {
  with_type(rows.scalar_type(), [&](auto t) {
    using T = decltype(t);
    weigh_kernel<<<count_of(slots.numel()), kThreads, 0, stream()>>>(out.data_ptr<float>(), rows.const_data_ptr<T>(), grad.const_data_ptr<T>(),
                                                                     slots.const_data_ptr<int64_t>(), slots.size(1), rows.stride(0), grad.stride(0),
                                                                     rows.size(1));
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

DispatchRoutines dispatch_routines() {
  DispatchRoutines all;
  all.choose = choose;
  all.plan = plan;
  all.gather = gather;
  all.combine = combine;
  all.weigh = weigh;
  return all;
}

}  // namespace tessera::kernels::cuda
