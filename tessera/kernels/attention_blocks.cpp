#include "tessera/kernels/attention_blocks.h"

#include <cmath>
#include <limits>

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_native.h>

#include "tessera/core/parallel.h"
#include "tessera/kernels/block_product.h"
#include "tessera/kernels/product_blocks.h"
#include "tessera/kernels/replace_operators.h"

// With p = exp(scale q k^T - log_sum_exp), delta = the sum of dy y over features, and ds = p (dy v^T - delta) scale (FlashAttention-2, arXiv:2307.08691):
//   dv = p^T dy,  dk = ds^T q,  dq = ds k
// Blocks of scores lie transposed, a key a row. Then p^T and ds^T are read from the left as they are, what belongs to a query is a vector, and the third
// product is made as dq^T = k^T ds^T, for which two rows of ds^T are laid into each other's words as they are rounded: nothing is transposed within the loop
// over blocks. Keys are the outer loop, whose dk and dv stay in cache; dq^T of all queries is kept until the end.

namespace tessera::kernels {

namespace {

/// A view [B, H, S, D], or [B, H, S], whose features lie side by side.
template <class T>
struct Heads {
  explicit Heads(const at::Tensor& x) : data(static_cast<T*>(x.data_ptr())), batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)) {}
  T* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
  T* data;
  int64_t batch, head, token;
};

struct Sizes {
  Sizes(const at::Tensor& q, const at::Tensor& k)
      : batch(q.size(0)), kv_heads(k.size(1)), group(q.size(1) / k.size(1)), queries(q.size(2)), keys(k.size(2)), dim(q.size(3)) {}
  int64_t batch, kv_heads, group, queries, keys, dim;
};

/// Columns of panels, whose last one is filled up.
int64_t to_panels(int64_t columns) { return up_to(columns, 16); }

/// Deals out a thread's scratch, a piece at each cache line; without memory it counts.
class Pieces {
 public:
  explicit Pieces(char* memory = nullptr) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    char* here = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += up_to(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(here);
  }
  int64_t bytes() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

template <class T>
struct Workspace {
  Workspace(const Sizes& s, Pieces& pieces)
      : q_columns(pieces.take<T>(to_panels(s.queries) * s.dim)),
        dy_columns(pieces.take<T>(to_panels(s.queries) * s.dim)),
        q_rows(pieces.take<T>(whole_words<T>(s.queries) * to_panels(s.dim))),
        dy_rows(pieces.take<T>(whole_words<T>(s.queries) * to_panels(s.dim))),
        dq(pieces.take<float>(to_panels(s.queries) * s.dim)),
        log_sum_exp(pieces.take<float>(to_panels(s.queries))),
        delta(pieces.take<float>(to_panels(s.queries))),
        k_columns(pieces.take<T>(kBlock * s.dim)),
        dk(pieces.take<float>((s.group == 1 ? kBlock : s.keys) * to_panels(s.dim))),
        dv(pieces.take<float>((s.group == 1 ? kBlock : s.keys) * to_panels(s.dim))),
        scores(pieces.take<float>(kBlock * kBlock)),
        d_probabilities(pieces.take<float>(kBlock * kBlock)),
        probabilities(pieces.take<T>(kBlock * kBlock)),
        gradient(pieces.take<T>(kBlock * kBlock)),
        words(pieces.take<T>(kBlock * kBlock)),
        rows(pieces.take<float>(kBlock * s.dim)) {}

  T *q_columns, *dy_columns;  ///< blocks of queries as panels whose inner dimension are features
  T *q_rows, *dy_rows;        ///< the same with features as columns
  float* dq;                  ///< of each block of queries [dim, queries]
  float *log_sum_exp, *delta;
  T* k_columns;  ///< a block of keys [dim, keys]
  float *dk, *dv;
  float *scores, *d_probabilities;
  T *probabilities, *gradient, *words;
  float* rows;
};

template <class T>
int64_t bytes_of_workspace(const Sizes& sizes) {
  Pieces pieces;
  const Workspace<T> counted(sizes, pieces);
  return pieces.bytes();
}

template <class T>
class Backward {
 public:
  struct Tensors {
    const at::Tensor &dy, &q, &k, &v, &y, &log_sum_exp, &dq, &dk, &dv;
  };
  Backward(const Tensors& t, bool causal, float scale)
      : sizes_(t.q, t.k),
        dy_(t.dy),
        q_(t.q),
        k_(t.k),
        v_(t.v),
        y_(t.y),
        dq_(t.dq),
        dk_(t.dk),
        dv_(t.dv),
        sums_(t.log_sum_exp),
        causal_(causal),
        scale_(scale),
        type_(type_of(t.q)) {}

  void run(const Scratch& scratch) const {
    const int64_t products = 5 * sizes_.group * sizes_.queries * sizes_.keys * sizes_.dim;
    parallel_for(0, sizes_.batch * sizes_.kv_heads, task_grain(products), [&](int64_t begin, int64_t end) {
      Pieces pieces(scratch.data());
      const Workspace<T> here(sizes_, pieces);
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t member = 0; member < sizes_.group; ++member) head(here, i / sizes_.kv_heads, i % sizes_.kv_heads, member);
      }
      at::native::cpublas::brgemm_release(sizeof(T) == 2);
    });
  }

 private:
  void head(const Workspace<T>& here, int64_t batch, int64_t kv_head, int64_t member) const {
    const int64_t head = kv_head * sizes_.group + member;
    pack_queries(here, batch, head);
    for (int64_t j = 0; j < sizes_.keys; j += kBlock) keys(here, batch, kv_head, member, j);
    for (int64_t i = 0; i < sizes_.queries; i += kBlock) {
      const int64_t count = std::min(kBlock, sizes_.queries - i), dim = sizes_.dim;
      cpu::loops().rows_of_columns({.from = {here.dq + i * dim, cpu::Type::Float}, .stride = to_panels(count), .inner = dim, .outer = count, .to = here.rows});
      cpu::loops().round_rows({here.rows, dim, {dq_.at(batch, head, i), type_}, dq_.token, count, dim});
    }
  }

  void pack_queries(const Workspace<T>& here, int64_t batch, int64_t head) const {
    const int64_t dim = sizes_.dim;
    cpu::loops().dot_rows({.left = {dy_.at(batch, head, 0), type_},
                           .right = {y_.at(batch, head, 0), type_},
                           .left_stride = dy_.token,
                           .right_stride = y_.token,
                           .rows = sizes_.queries,
                           .dim = dim,
                           .out = here.delta});
    constexpr float kEndless = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < sizes_.queries; ++i) {
      const float sum = *sums_.at(batch, head, i);
      here.log_sum_exp[i] = sum == -kEndless ? kEndless : sum;  // it saw no key: its probabilities are zeros
    }
    std::fill(here.log_sum_exp + sizes_.queries, here.log_sum_exp + to_panels(sizes_.queries), kEndless);
    std::fill(here.delta + sizes_.queries, here.delta + to_panels(sizes_.queries), 0.F);
    const auto pack = [&](const Heads<const T>& from, int64_t i, T* columns, T* rows) {
      const int64_t count = std::min(kBlock, sizes_.queries - i);
      const cpu::Input block{from.at(batch, head, i), type_};
      cpu::loops().panel_of_columns({.from = block, .stride = from.token, .inner = dim, .outer = count, .to = columns + i * dim});
      cpu::loops().panel_of_rows({.from = block, .stride = from.token, .inner = count, .outer = dim, .to = rows + i * to_panels(dim)});
    };
    for (int64_t i = 0; i < sizes_.queries; i += kBlock) {
      pack(q_, i, here.q_columns, here.q_rows);
      pack(dy_, i, here.dy_columns, here.dy_rows);
    }
  }

  /// dk and dv of a block of keys as far as this head of the group goes, and its terms of dq.
  void keys(const Workspace<T>& here, int64_t batch, int64_t kv_head, int64_t member, int64_t j) const {
    const int64_t count = std::min(kBlock, sizes_.keys - j), features = to_panels(sizes_.dim);
    const int64_t offset = sizes_.group == 1 ? 0 : j * features;
    float *dk = here.dk + offset, *dv = here.dv + offset;
    const int64_t first = causal_ ? j : 0;  // blocks before see none of these keys
    if (member == 0 && first >= sizes_.queries) {
      std::fill_n(dk, count * features, 0.F);
      std::fill_n(dv, count * features, 0.F);
    }
    cpu::loops().rows_of_columns({.from = {k_.at(batch, kv_head, j), type_}, .stride = k_.token, .inner = count, .outer = sizes_.dim, .to = here.k_columns});
    for (int64_t i = first; i < sizes_.queries; i += kBlock) {
      block(here, k_.at(batch, kv_head, j), v_.at(batch, kv_head, j), i, j, dk, dv, /*add=*/member > 0 || i > first);
    }
    if (member + 1 < sizes_.group) return;
    cpu::loops().round_rows({dk, features, {dk_.at(batch, kv_head, j), type_}, dk_.token, count, sizes_.dim});
    cpu::loops().round_rows({dv, features, {dv_.at(batch, kv_head, j), type_}, dv_.token, count, sizes_.dim});
  }

  void block(const Workspace<T>& here, const T* k, const T* v, int64_t i, int64_t j, float* dk, float* dv, bool add) const {
    const int64_t dim = sizes_.dim, features = to_panels(dim);
    const int64_t keys = std::min(kBlock, sizes_.keys - j), queries = std::min(kBlock, sizes_.queries - i), width = to_panels(queries);
    multiply_block<T>(k, k_.token, here.q_columns + i * dim, {here.scores, width}, keys, dim, width);
    multiply_block<T>(v, v_.token, here.dy_columns + i * dim, {here.d_probabilities, width}, keys, dim, width);
    cpu::loops().attention_gradient({.type = type_,
                                     .scores = here.scores,
                                     .d_probabilities = here.d_probabilities,
                                     .log_sum_exp = here.log_sum_exp + i,
                                     .delta = here.delta + i,
                                     .scale = scale_,
                                     .keys = keys,
                                     .width = width,
                                     .first = causal_ && i == j ? 0 : -keys,
                                     .probabilities = here.probabilities,
                                     .gradient = here.gradient,
                                     .words = here.words});
    const T* gradient = sizeof(T) == 2 ? here.gradient : here.words;
    const int64_t inner = whole_words<T>(queries);
    for (int64_t feature = 0; feature < dim; feature += kBlock) {
      const int64_t panel = i * features + feature * inner, columns = cpu::panel_width(dim - feature);
      multiply_block<T>(here.probabilities, width, here.dy_rows + panel, {dv + feature, features}, keys, inner, columns, add);
      multiply_block<T>(gradient, width, here.q_rows + panel, {dk + feature, features}, keys, inner, columns, add);
    }
    const int64_t inner_keys = whole_words<T>(keys);
    multiply_block<T>(here.k_columns, inner_keys, here.words, {here.dq + i * dim, width}, dim, inner_keys, width, /*add=*/j > 0);
  }

  Sizes sizes_;
  Heads<const T> dy_, q_, k_, v_, y_;
  Heads<T> dq_, dk_, dv_;
  Heads<const float> sums_;
  bool causal_;
  float scale_;
  cpu::Type type_;
};

at::Tensor tokens_first(const at::Tensor& x) { return at::empty(x.transpose(1, 2).sizes(), x.options()).transpose(1, 2); }

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                        const at::Tensor& y, const at::Tensor& log_sum_exp, double dropout, bool causal,
                                                        const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  if (attends_in_blocks(q, k, dropout, mask)) return attention_backward_in_blocks(dy, q, k, v, y, log_sum_exp, causal, scale);
  return at::native::_scaled_dot_product_flash_attention_cpu_backward(dy, q, k, v, y, log_sum_exp, dropout, causal, mask, scale);
}

[[maybe_unused]] const torch::Library replaced =
    replace_operators(__FILE__, __LINE__, [](torch::Library& library) { library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", backward); });

}  // namespace

bool attends_in_blocks(const at::Tensor& q, const at::Tensor& k, double dropout, const std::optional<at::Tensor>& mask) {
  if (dropout != 0 || (mask.has_value() && mask->defined()) || q.numel() == 0 || k.numel() == 0) return false;
  return multiplies_blocks(q) && (q.scalar_type() == at::kFloat || q.size(3) % 2 == 0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward_in_blocks(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                            const at::Tensor& y, const at::Tensor& log_sum_exp, bool causal,
                                                                            std::optional<double> scale) {
  const at::Tensor dq = tokens_first(q), dk = tokens_first(k), dv = tokens_first(v);
  const at::Tensor rows_of_dy = with_rows(dy), rows_of_q = with_rows(q), rows_of_k = with_rows(k), rows_of_v = with_rows(v), rows_of_y = with_rows(y);
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  with_type_of(q, [&](auto type) {
    using T = decltype(type);
    const Scratch scratch(bytes_of_workspace<T>(Sizes(q, k)), q);
    if (q.is_meta()) return;
    Backward<T>({rows_of_dy, rows_of_q, rows_of_k, rows_of_v, rows_of_y, log_sum_exp, dq, dk, dv}, causal, static_cast<float>(factor)).run(scratch);
  });
  return {dq, dk, dv};
}

}  // namespace tessera::kernels
