#pragma once

#include "tessera/kernels/cpu/loops_attention.h"
#include "tessera/kernels/cpu/loops_cross_entropy.h"
#include "tessera/kernels/cpu/loops_dropout.h"
#include "tessera/kernels/cpu/loops_norm.h"
#include "tessera/kernels/cpu/loops_panels.h"
#include "tessera/kernels/cpu/loops_pointwise.h"
#include "tessera/kernels/cpu/loops_quantized.h"
#include "tessera/kernels/cpu/loops_rows.h"
#include "tessera/kernels/cpu/loops_update.h"

/// The loops of this translation unit's instruction set, with run-time types turned into template arguments.
namespace tessera::kernels::cpu {
namespace {

template <class T>
struct Tag {
  using type = T;
};

/// f(Tag<float>) or f(Tag<BFloat16>).
template <class F>
void with_type(Type type, F&& f) {
  if (type == Type::Float) {
    f(Tag<float>{});
  } else {
    f(Tag<BFloat16>{});
  }
}

/// with_type(), or f(Tag<Half>).
template <class F>
void with_update_type(Type type, F&& f) {
  type == Type::Half ? f(Tag<Half>{}) : with_type(type, f);
}

/// f(SiluGate{}) or f(GeluGate{}).
template <class F>
void with_activation(Activation activation, F&& f) {
  if (activation == Activation::Silu) {
    f(SiluGate{});
  } else {
    f(GeluGate{});
  }
}

constexpr Loops make_loops(const char* name) {
  Loops loops{};
  loops.name = name;
  loops.rms_norm = [](const RmsNorm& args, int64_t begin, int64_t end) {
    with_type(args.x.type, [&](auto x) {
      with_type(args.weight.type, [&](auto w) {
        with_type(args.out.type,
                  [&](auto y) { rms_norm_rows<typename decltype(x)::type, typename decltype(w)::type, typename decltype(y)::type>(args, begin, end); });
      });
    });
  };
  loops.rms_norm_backward = [](const RmsNormBackward& args, int64_t begin, int64_t end) {
    with_type(args.grad.type, [&](auto g) {
      with_type(args.x.type, [&](auto x) {
        with_type(args.weight.type, [&](auto w) {
          rms_norm_backward_blocks<typename decltype(g)::type, typename decltype(x)::type, typename decltype(w)::type>(args, begin, end);
        });
      });
    });
  };
  loops.layer_norm = [](const LayerNorm& args, int64_t begin, int64_t end) {
    with_type(args.x.type, [&](auto x) {
      with_type(args.weight.type, [&](auto w) {
        with_type(args.out.type,
                  [&](auto y) { layer_norm_rows<typename decltype(x)::type, typename decltype(w)::type, typename decltype(y)::type>(args, begin, end); });
      });
    });
  };
  loops.layer_norm_backward = [](const LayerNormBackward& args, int64_t begin, int64_t end) {
    with_type(args.grad.type, [&](auto g) {
      with_type(args.x.type, [&](auto x) {
        with_type(args.weight.type, [&](auto w) {
          layer_norm_backward_blocks<typename decltype(g)::type, typename decltype(x)::type, typename decltype(w)::type>(args, begin, end);
        });
      });
    });
  };
  loops.add_rows = [](const AddRows& args, int64_t begin, int64_t end) {
    with_type(args.x.type, [&](auto x) {
      with_type(args.added.type, [&](auto a) { add_row_elements<typename decltype(x)::type, typename decltype(a)::type>(args, begin, end); });
    });
  };
  loops.bias_activation = [](const BiasActivation& args, int64_t begin, int64_t end) {
    with_type(args.x.type, [&](auto x) {
      with_type(args.bias.type, [&](auto b) {
        with_activation(args.activation,
                        [&](auto f) { bias_activation_rows<typename decltype(x)::type, typename decltype(b)::type, decltype(f)>(args, begin, end); });
      });
    });
  };
  loops.bias_activation_backward = [](const BiasActivationBackward& args, int64_t begin, int64_t end) {
    with_type(args.x.type, [&](auto x) {
      with_type(args.bias.type, [&](auto b) {
        with_activation(args.activation, [&](auto f) {
          bias_activation_backward_blocks<typename decltype(x)::type, typename decltype(b)::type, decltype(f)>(args, begin, end);
        });
      });
    });
  };
  loops.embedding_gradient = [](const EmbeddingGradient& args, int64_t begin, int64_t end) {
    with_type(args.rows.type, [&](auto t) {
      with_type(args.sum.type, [&](auto s) { embedding_gradient_columns<typename decltype(t)::type, typename decltype(s)::type>(args, begin, end); });
    });
  };
  loops.adamw = [](const AdamW& args, int64_t begin, int64_t end) {
    with_update_type(args.gradient.type, [&](auto g) {
      using G = typename decltype(g)::type;
      if (args.copy.data == nullptr) return adamw_elements<G, NoCopy>(args, begin, end);
      args.copy.type == Type::Half ? adamw_elements<G, Half>(args, begin, end) : adamw_elements<G, BFloat16>(args, begin, end);
    });
  };
  loops.dequantize = [](const QuantizedRow& args) { with_type(args.out.type, [&](auto t) { dequantize_row<typename decltype(t)::type>(args); }); };
  loops.swiglu = [](const SwiGlu& args, int64_t begin, int64_t end) {
    with_type(args.gate.type,
              [&](auto t) { with_activation(args.activation, [&](auto f) { swiglu_rows<typename decltype(t)::type, decltype(f)>(args, begin, end); }); });
  };
  loops.swiglu_backward = [](const SwiGluBackward& args, int64_t begin, int64_t end) {
    with_type(args.gate.type, [&](auto t) {
      with_activation(args.activation, [&](auto f) { swiglu_backward_rows<typename decltype(t)::type, decltype(f)>(args, begin, end); });
    });
  };
  loops.rope = [](const Rope& args, int64_t begin, int64_t end) {
    with_type(args.x.type, [&](auto t) { rope_tokens<typename decltype(t)::type>(args, begin, end); });
  };
  loops.cross_entropy = [](const CrossEntropy& args, int64_t begin, int64_t end) {
    with_type(args.logits.type, [&](auto t) { cross_entropy_rows<typename decltype(t)::type>(args, begin, end); });
  };
  loops.cross_entropy_gradient = [](const CrossEntropyGradient& args, int64_t begin, int64_t end) {
    with_type(args.logits.type, [&](auto t) { cross_entropy_gradient_rows<typename decltype(t)::type>(args, begin, end); });
  };
  loops.cross_entropy_in_place = [](const CrossEntropyInPlace& args, int64_t begin, int64_t end) {
    with_type(args.logits.type, [&](auto t) { cross_entropy_in_place_rows<typename decltype(t)::type>(args, begin, end); });
  };
  loops.cross_entropy_part = [](const CrossEntropyPart& args, int64_t begin, int64_t end) {
    with_type(args.logits.type, [&](auto t) { cross_entropy_part_rows<typename decltype(t)::type>(args, begin, end); });
  };
  loops.cross_entropy_part_gradient = [](const CrossEntropyPartGradient& args, int64_t begin, int64_t end) {
    with_type(args.logits.type, [&](auto t) { cross_entropy_part_gradient_rows<typename decltype(t)::type>(args, begin, end); });
  };
  loops.dropout = [](const Dropout& args, int64_t begin, int64_t end) {
    with_type(args.x.type, [&](auto t) { dropout_rows<typename decltype(t)::type>(args, begin, end); });
  };
  loops.gather_rows = [](const GatherRows& args, int64_t begin, int64_t end) {
    with_type(args.x.type, [&](auto t) { gather_places<typename decltype(t)::type>(args, begin, end); });
  };
  loops.combine_rows = [](const CombineRows& args, int64_t begin, int64_t end) {
    with_type(args.rows.type, [&](auto t) { combine_tokens<typename decltype(t)::type>(args, begin, end); });
  };
  loops.weigh_rows = [](const WeighRows& args, int64_t begin, int64_t end) {
    with_type(args.rows.type, [&](auto t) { weigh_tokens<typename decltype(t)::type>(args, begin, end); });
  };
  loops.sum_rows = [](const float* rows, int64_t num_rows, int64_t dim, Output out, int64_t begin, int64_t end) {
    with_type(out.type, [&](auto t) { sum_rows_columns<typename decltype(t)::type>(rows, num_rows, dim, out.data, begin, end); });
  };
  loops.accumulate = [](float* sum, Input term, bool first, int64_t begin, int64_t end) {
    with_type(term.type, [&](auto t) { accumulate_elements<typename decltype(t)::type>(sum, term.data, first, begin, end); });
  };
  loops.panel_of_rows = [](const Panel& args) { with_type(args.from.type, [&](auto t) { panel_of_rows<typename decltype(t)::type>(args); }); };
  loops.panel_of_columns = [](const Panel& args) { with_type(args.from.type, [&](auto t) { panel_of_columns<typename decltype(t)::type>(args); }); };
  loops.rows_of_columns = [](const Panel& args) { with_type(args.from.type, [&](auto t) { rows_of_columns<typename decltype(t)::type>(args); }); };
  loops.round_rows = [](const RoundRows& args) { with_type(args.to.type, [&](auto t) { round_rows<typename decltype(t)::type>(args); }); };
  loops.attention_gradient = [](const AttentionGradient& args) {
    with_type(args.type, [&](auto t) { attention_gradient_block<typename decltype(t)::type>(args); });
  };
  loops.dot_rows = [](const DotRows& args) { with_type(args.left.type, [&](auto t) { dot_rows<typename decltype(t)::type>(args); }); };
  loops.sum_of_squares = [](const float* x, int64_t n) { return sum_of_squares(x, n); };
  return loops;
}

}  // namespace
}  // namespace tessera::kernels::cpu
