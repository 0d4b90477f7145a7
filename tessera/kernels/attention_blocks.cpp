#include "tessera/kernels/attention_blocks.h"

#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_native.h>

#include "tessera/core/ambient.h"
#include "tessera/core/parallel.h"
#include "tessera/kernels/block_product.h"
#include "tessera/kernels/product_blocks.h"
#include "tessera/kernels/replace_operators.h"
#include "tessera/memory/on_host.h"

// With p = exp(scale q k^T - log_sum_exp), delta = the sum of dy y over features, and ds = p (dy v^T - delta) scale (FlashAttention-2, arXiv:2307.08691):
//   dv = p^T dy,  dk = ds^T q,  dq = ds k
// Blocks of scores lie transposed, a key a row. Then p^T and ds^T are read from the left as they are, what belongs to a query is a vector, and the third
// product is made as dq^T = k^T ds^T, for which two rows of ds^T are laid into each other's words as they are rounded: nothing is transposed within the loop
// over blocks. Keys are the outer loop, whose dk and dv stay in cache; dq^T of all queries is kept until the end.

namespace tessera::kernels {

namespace {

const Ambient<bool> gradients_as_summed;

/// A view [B, H, S, D], or [B, H, S], whose features lie side by side.
template <class T>
struct Heads {
  explicit Heads(const at::Tensor& x) : data(static_cast<T*>(x.data_ptr())), batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)) {}
  T* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
  T* data;
  int64_t batch, head, token;
};

/// A gradient of the same layout, of either type.
struct Gradient {
  explicit Gradient(const at::Tensor& x)
      : data(static_cast<char*>(x.data_ptr())), size(x.element_size()), batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)), type(type_of(x)) {}
  cpu::Output at(int64_t b, int64_t h, int64_t t) const { return {data + (b * batch + h * head + t * token) * size, type}; }
  char* data;
  int64_t size, batch, head, token;
  cpu::Type type;
};

struct Sizes {
  Sizes(const at::Tensor& q, const at::Tensor& k)
      : batch(q.size(0)), kv_heads(k.size(1)), group(q.size(1) / k.size(1)), queries(q.size(2)), keys(k.size(2)), dim(q.size(3)) {}
  /// A task is a head of keys; how many a thread is worth.
  int64_t tasks() const { return batch * kv_heads; }
  int64_t grain() const { return task_grain(5 * group * queries * keys * dim); }
  int64_t batch, kv_heads, group, queries, keys, dim;
};

/// Columns of panels, whose last one is filled up.
int64_t to_panels(int64_t columns) { return up_to(columns, 16); }

/// Queries or keys of a block, the last of which is filled up with zeros: libtorch keeps a product's program for each shape that it ever had, half a megabyte
/// each, and lengths vary.
int64_t to_block(int64_t count) { return up_to(count, kBlock / 4); }

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

/// Keys whose dk and dv are summed together: packing a block of queries is then paid for by so many blocks of products, and their sums stay in cache.
constexpr int64_t kChunk = 8 * kBlock;

template <class T>
struct Workspace {
  Workspace(const Sizes& s, Pieces& pieces) : Workspace(s, pieces, Largest(s)) {}

  float* dq;                   ///< of each head of the group, and each block of its queries, [dim, queries]
  float *log_sum_exp, *delta;  ///< of each head of the group
  T *q_columns, *dy_columns;   ///< a block of queries as a panel whose inner dimension are features
  T *q_rows, *dy_rows;         ///< the same with features as columns
  T* k_columns;                ///< of each block of keys [dim, keys]
  T *last_k, *last_v;          ///< the last block of keys, filled up; taken of whole blocks, too, so that no shorter keys take more than a plan says of these
  float *dk, *dv;              ///< of the chunk
  float *scores, *d_probabilities;
  T *probabilities, *gradient, *words;
  float* rows;  ///< a block of dq
  T* last;      ///< the last block of queries, filled up, while dq is summed

 private:
  /// The largest block, and keys at once.
  struct Largest {
    explicit Largest(const Sizes& s)
        : queries(std::min(kBlock, to_block(s.queries))), keys(std::min(kBlock, to_block(s.keys))), chunk(std::min(kChunk, to_block(s.keys))) {}
    int64_t queries, keys, chunk;
  };
  Workspace(const Sizes& s, Pieces& pieces, const Largest& block)
      : dq(pieces.take<float>(s.group * to_block(s.queries) * s.dim)),
        log_sum_exp(pieces.take<float>(s.group * to_block(s.queries))),
        delta(pieces.take<float>(s.group * to_block(s.queries))),
        q_columns(pieces.take<T>(block.queries * s.dim)),
        dy_columns(pieces.take<T>(block.queries * s.dim)),
        q_rows(pieces.take<T>(block.queries * to_panels(s.dim))),
        dy_rows(pieces.take<T>(block.queries * to_panels(s.dim))),
        k_columns(pieces.take<T>(block.chunk * s.dim)),
        last_k(pieces.take<T>(block.keys * s.dim)),
        last_v(pieces.take<T>(block.keys * s.dim)),
        dk(pieces.take<float>(block.chunk * to_panels(s.dim))),
        dv(pieces.take<float>(block.chunk * to_panels(s.dim))),
        scores(pieces.take<float>(block.keys * block.queries)),
        d_probabilities(pieces.take<float>(block.keys * block.queries)),
        rows(pieces.take<float>(block.queries * s.dim)),
        last(reinterpret_cast<T*>(rows)) {
    // A word holds one float, so that attention_gradient reads each number for the last time where it writes what it makes of it. Of narrower ones it holds a
    // pair, of two rows, and lies elsewhere.
    static_assert(sizeof(T) * (std::is_same_v<T, float> ? 1 : 2) == sizeof(uint32_t));
    if constexpr (std::is_same_v<T, float>) {
      probabilities = scores;
      gradient = words = d_probabilities;
    } else {
      probabilities = pieces.take<T>(block.keys * block.queries);
      gradient = pieces.take<T>(block.keys * block.queries);
      words = pieces.take<T>(block.keys * block.queries);
    }
  }
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
    parallel_for(0, sizes_.tasks(), sizes_.grain(), [&](int64_t begin, int64_t end) {
      Pieces pieces(scratch.data());
      const Workspace<T> workspace(sizes_, pieces);
      for (int64_t i = begin; i < end; ++i) backward_of_group(workspace, {i / sizes_.kv_heads, i % sizes_.kv_heads});
      at::native::cpublas::brgemm_release(sizeof(T) == 2);
    });
  }

 private:
  /// A head of keys and values, and those of queries that share it.
  struct Place {
    int64_t batch, kv_head;
  };
  int64_t head_of(const Place& place, int64_t member) const { return place.kv_head * sizes_.group + member; }

  void backward_of_group(const Workspace<T>& workspace, const Place& place) const {
    for (int64_t member = 0; member < sizes_.group; ++member) look_at_queries(workspace, place, member);
    for (int64_t chunk = 0; chunk < sizes_.keys; chunk += kChunk) backward_of_key_chunk(workspace, place, chunk, std::min(chunk + kChunk, sizes_.keys));
    for (int64_t member = 0; member < sizes_.group; ++member) {
      for (int64_t i = 0; i < sizes_.queries; i += kBlock) {
        const int64_t count = queries_from(i), dim = sizes_.dim;
        const cpu::Input sums{dq_of(workspace, member, i), cpu::Type::Float};
        cpu::loops().rows_of_columns({.from = sums, .stride = to_block(count), .inner = dim, .outer = count, .to = workspace.rows});
        cpu::loops().round_rows({workspace.rows, dim, dq_.at(place.batch, head_of(place, member), i), dq_.token, count, dim});
      }
    }
  }

  int64_t queries_from(int64_t i) const { return std::min(kBlock, sizes_.queries - i); }
  float* dq_of(const Workspace<T>& workspace, int64_t member, int64_t i) const { return workspace.dq + (member * to_block(sizes_.queries) + i) * sizes_.dim; }
  /// The first block of queries that sees keys from `j` on.
  int64_t first_of(int64_t j) const { return causal_ ? j : 0; }

  void look_at_queries(const Workspace<T>& workspace, const Place& place, int64_t member) const {
    const int64_t head = head_of(place, member), columns = to_block(sizes_.queries);
    float *sums = workspace.log_sum_exp + member * columns, *delta = workspace.delta + member * columns;
    cpu::loops().dot_rows({.left = {dy_.at(place.batch, head, 0), type_},
                           .right = {y_.at(place.batch, head, 0), type_},
                           .left_stride = dy_.token,
                           .right_stride = y_.token,
                           .rows = sizes_.queries,
                           .dim = sizes_.dim,
                           .out = delta});
    constexpr float kEndless = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < sizes_.queries; ++i) {
      const float sum = *sums_.at(place.batch, head, i);
      sums[i] = sum == -kEndless ? kEndless : sum;  // it saw no key: its probabilities are zeros
    }
    std::fill(sums + sizes_.queries, sums + columns, kEndless);
    std::fill(delta + sizes_.queries, delta + columns, 0.F);
  }

  /// Rows of a block, and how many elements lie between the beginnings of two.
  struct Rows {
    const T* data;
    int64_t stride;
  };
  /// `count` rows, filled up in `last` where they are no whole block.
  Rows filled_up(Rows rows, int64_t count, T* last) const {
    if (count == to_block(count)) return rows;
    for (int64_t row = 0; row < count; ++row) std::copy_n(rows.data + row * rows.stride, sizes_.dim, last + row * sizes_.dim);
    std::fill_n(last + count * sizes_.dim, (to_block(count) - count) * sizes_.dim, T(0));
    return {last, sizes_.dim};
  }

  /// A block of keys and its values.
  struct KeyTile {
    Rows k, v;
    int64_t count;
  };

  /// dk and dv of keys `begin` to `end`, and their terms of dq.
  void backward_of_key_chunk(const Workspace<T>& workspace, const Place& place, int64_t begin, int64_t end) const {
    const int64_t features = to_panels(sizes_.dim);
    std::array<KeyTile, kChunk / kBlock> tiles;
    for (int64_t j = begin; j < end; j += kBlock) {
      const int64_t count = std::min(kBlock, end - j), at = j - begin;
      KeyTile& tile = tiles[static_cast<size_t>(at / kBlock)];
      tile = {.k = filled_up({k_.at(place.batch, place.kv_head, j), k_.token}, count, workspace.last_k),
              .v = filled_up({v_.at(place.batch, place.kv_head, j), v_.token}, count, workspace.last_v),
              .count = count};
      cpu::loops().rows_of_columns(
          {.from = {tile.k.data, type_}, .stride = tile.k.stride, .inner = to_block(count), .outer = sizes_.dim, .to = workspace.k_columns + at * sizes_.dim});
      if (first_of(j) < sizes_.queries) continue;
      std::fill_n(workspace.dk + at * features, count * features, 0.F);
      std::fill_n(workspace.dv + at * features, count * features, 0.F);
    }
    for (int64_t member = 0; member < sizes_.group; ++member) {
      for (int64_t i = first_of(begin); i < sizes_.queries; i += kBlock) {
        pack({q_.at(place.batch, head_of(place, member), i), q_.token}, queries_from(i), workspace.last, workspace.q_columns, workspace.q_rows);
        pack({dy_.at(place.batch, head_of(place, member), i), dy_.token}, queries_from(i), workspace.last, workspace.dy_columns, workspace.dy_rows);
        for (int64_t j = begin; j < end && first_of(j) <= i; j += kBlock) {
          backward_of_tile(workspace, tiles[static_cast<size_t>((j - begin) / kBlock)], member, i, j, begin);
        }
      }
    }
    for (int64_t j = begin; j < end; j += kBlock) {
      const int64_t count = std::min(kBlock, end - j), at = (j - begin) * features;
      cpu::loops().round_rows({workspace.dk + at, features, dk_.at(place.batch, place.kv_head, j), dk_.token, count, sizes_.dim});
      cpu::loops().round_rows({workspace.dv + at, features, dv_.at(place.batch, place.kv_head, j), dv_.token, count, sizes_.dim});
    }
  }

  void pack(Rows from, int64_t count, T* last, T* columns, T* rows) const {
    const Rows block = filled_up(from, count, last);
    const int64_t queries = to_block(count);
    cpu::loops().panel_of_columns({.from = {block.data, type_}, .stride = block.stride, .inner = sizes_.dim, .outer = queries, .to = columns});
    cpu::loops().panel_of_rows({.from = {block.data, type_}, .stride = block.stride, .inner = queries, .outer = sizes_.dim, .to = rows});
  }

  /// Of a block of queries and one of keys.
  void backward_of_tile(const Workspace<T>& workspace, const KeyTile& tile, int64_t member, int64_t i, int64_t j, int64_t chunk) const {
    const int64_t dim = sizes_.dim, features = to_panels(dim), rows = to_block(tile.count), width = to_block(queries_from(i));
    const int64_t column = member * to_block(sizes_.queries) + i;
    multiply_block<T>(tile.k.data, tile.k.stride, workspace.q_columns, {workspace.scores, width}, rows, dim, width);
    multiply_block<T>(tile.v.data, tile.v.stride, workspace.dy_columns, {workspace.d_probabilities, width}, rows, dim, width);
    cpu::loops().attention_gradient({.type = type_,
                                     .scores = workspace.scores,
                                     .d_probabilities = workspace.d_probabilities,
                                     .log_sum_exp = workspace.log_sum_exp + column,
                                     .delta = workspace.delta + column,
                                     .scale = scale_,
                                     .keys = tile.count,
                                     .rows = rows,
                                     .width = width,
                                     .first = causal_ && i == j ? 0 : -rows,
                                     .probabilities = workspace.probabilities,
                                     .gradient = workspace.gradient,
                                     .words = workspace.words});
    const int64_t sums = (j - chunk) * features;
    const bool add = member > 0 || i > first_of(j);
    for (int64_t feature = 0; feature < dim; feature += kBlock) {
      const int64_t panel = feature * width, columns = cpu::panel_width(dim - feature);
      multiply_block<T>(workspace.probabilities, width, workspace.dy_rows + panel, {workspace.dv + sums + feature, features}, rows, width, columns, add);
      multiply_block<T>(workspace.gradient, width, workspace.q_rows + panel, {workspace.dk + sums + feature, features}, rows, width, columns, add);
    }
    multiply_block<T>(workspace.k_columns + (j - chunk) * dim, rows, workspace.words, {dq_of(workspace, member, i), width}, dim, rows, width, /*add=*/j > 0);
  }

  Sizes sizes_;
  Heads<const T> dy_, q_, k_, v_, y_;
  Gradient dq_, dk_, dv_;
  Heads<const float> sums_;
  bool causal_;
  float scale_;
  cpu::Type type_;
};

at::Tensor gradient_of(const at::Tensor& x) {
  return at::empty(x.transpose(1, 2).sizes(), *gradients_as_summed ? x.options().dtype(at::kFloat) : x.options()).transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                        const at::Tensor& y, const at::Tensor& log_sum_exp, double dropout, bool causal,
                                                        const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  if (attends_in_blocks(dy, q, k, v, y, log_sum_exp, dropout, mask)) return attention_backward_in_blocks(dy, q, k, v, y, log_sum_exp, causal, scale);
  return at::native::_scaled_dot_product_flash_attention_cpu_backward(dy, q, k, v, y, log_sum_exp, dropout, causal, mask, scale);
}

[[maybe_unused]] const torch::Library replaced =
    replace_operators(__FILE__, __LINE__, [](torch::Library& library) { library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", backward); });

}  // namespace

WideGradients::WideGradients(bool wide) : former_(std::exchange(*gradients_as_summed, wide)) {}
WideGradients::~WideGradients() { *gradients_as_summed = former_; }

bool attends_in_blocks(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& y, const at::Tensor& log_sum_exp,
                       double dropout, const std::optional<at::Tensor>& mask) {
  if (!is_on_host(q)) return false;  // there libtorch has kernels of its own
  if (dropout != 0 || (mask.has_value() && mask->defined()) || q.numel() == 0 || k.numel() == 0) return false;
  if (!multiplies_blocks(q) || (q.scalar_type() != at::kFloat && q.size(-1) % 2 != 0)) return false;
  // What does not fit together is refused by libtorch's kernel in its words.
  const bool fit = q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && dy.sizes() == q.sizes() && y.sizes() == q.sizes() &&
                   log_sum_exp.sizes() == q.sizes().slice(0, 3) && q.size(0) == k.size(0) && q.size(3) == k.size(3) && q.size(1) % k.size(1) == 0;
  const auto same = [&](const at::Tensor& x) { return x.scalar_type() == q.scalar_type() && x.device() == q.device(); };
  return fit && same(dy) && same(k) && same(v) && same(y) && log_sum_exp.scalar_type() == at::kFloat;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward_in_blocks(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                            const at::Tensor& y, const at::Tensor& log_sum_exp, bool causal,
                                                                            std::optional<double> scale) {
  const at::Tensor dq = gradient_of(q), dk = gradient_of(k), dv = gradient_of(v);
  const at::Tensor rows_of_dy = with_rows(dy), rows_of_q = with_rows(q), rows_of_k = with_rows(k), rows_of_v = with_rows(v), rows_of_y = with_rows(y);
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  with_type_of(q, [&](auto type) {
    using T = decltype(type);
    const Sizes sizes(q, k);
    const Scratch scratch(bytes_of_workspace<T>(sizes), q, sizes.tasks() / sizes.grain());
    if (q.is_meta()) return;
    Backward<T>({rows_of_dy, rows_of_q, rows_of_k, rows_of_v, rows_of_y, log_sum_exp, dq, dk, dv}, causal, static_cast<float>(factor)).run(scratch);
  });
  return {dq, dk, dv};
}

}  // namespace tessera::kernels
