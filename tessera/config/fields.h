#pragma once

/// Every configuration field, written once: TESSERA_<SECTION>_FIELDS(X) calls X(type, name, default, rule, doc) for each key of that section.
/// Struct members, TOML parsing, --set, the saved configuration, refusals and docs/configuration.md all come from these lists (see config.h).
///
/// `rule` says what TOML may hold beyond the type:
///   any()                  whatever the type allows
///   one_of("a, b")         one of these strings
///   one_of("a, b", "c")    the same; c is known by name, listed nowhere, and refused by validate() with its reason
///   number_or("a, b")      a number, or one of these strings
///   path()                 a file or folder: relative to the file it stands in, or to the working directory when given by --set
///   path_or("a, b")        the same, except that these strings stand for themselves
///   own()                  whatever the type allows; ranks of one run may each have their own
///   unset("text")          the field is an optional; `text` says what it becomes when it is not given
/// 0 on an integer without a stated default means "not given": validate() asks for it by name where the run needs it.

#define TESSERA_MODEL_FIELDS(X)                                                                                                                           \
  X(std::string, family, "", one_of("llama, gpt2, mixtral, mlp"), "Model family; may be left out beside `from_hf`.")                                      \
  X(int64_t, dim, 0, any(), "Width of the residual stream.")                                                                                              \
  X(int64_t, layers, 0, any(), "Number of blocks.")                                                                                                       \
  X(int64_t, heads, 0, any(), "Number of query heads; `dim` must be a multiple.")                                                                         \
  X(std::optional<int64_t>, kv_heads, std::nullopt, unset("model.heads"), "Number of key and value heads; must divide `heads`.")                          \
  X(std::optional<int64_t>, ffn_dim, std::nullopt, unset("llama, mixtral: 8/3 dim, rounded up to 64; gpt2, mlp: 4 dim"),                                  \
    "Width inside the feed-forward layers.")                                                                                                              \
  X(int64_t, vocab_size, 0, any(), "Rows of the embedding; at least the tokenizer's number of ids (`byte`: 256 where not given).")                        \
  X(std::optional<int64_t>, max_seq_len, std::nullopt, unset("data.seq_len; with from_hf the file's"), "Longest sequence the model can take, in tokens.") \
  X(int64_t, sliding_window, 0, any(), "Positions that attention sees: a token's own and those before it; 0: all of them.")                               \
  X(bool, tie_embeddings, false, any(), "The output head shares its weight with the token embedding.")                                                    \
  X(double, rope_theta, 10000.0, any(), "Base of the rotary embedding's wavelengths.")                                                                    \
  X(double, norm_eps, 1e-5, any(), "Added to the variance in every norm.")                                                                                \
  X(double, dropout, 0.0, any(), "Probability of dropping an activation while training.")                                                                 \
  X(int64_t, experts, 0, any(), "`mixtral`: experts of a block, each of width `ffn_dim`.")                                                                \
  X(int64_t, experts_per_token, 0, any(), "`mixtral`: experts that each token visits.")                                                                   \
  X(std::string, router, "softmax", one_of("softmax, sigmoid, expert_choice"),                                                                            \
    "How experts are chosen: the most probable, the largest sigmoid plus a bias that evens the load out, or by the experts themselves.")                  \
  X(bool, norm_topk, true, any(), "A token's weights over its experts sum to one; false: they are the router's scores.")                                  \
  X(int64_t, shared_ffn_dim, 0, any(), "`mixtral`: width of the expert that every token visits; 0: there is none.")                                       \
  X(bool, shared_gate, false, any(), "The shared expert's output is scaled by a sigmoid of its own.")                                                     \
  X(std::string, from_hf, "", path(), "Folder with a Hugging Face model: sets family, shape and starting weights; other model keys must agree.")

#define TESSERA_DATA_FIELDS(X)                                                                                                                       \
  X(std::vector<std::string>, files, {}, path(), "Training text, in this order; plain, `.gz` or `.dz`.")                                             \
  X(std::vector<std::string>, validation_files, {}, path(), "Held-out text.")                                                                        \
  X(std::string, tokenizer, "byte", path_or("byte"),                                                                                                 \
    "`byte`, or a SentencePiece `.model` file; with `from_hf` its `tokenizer.model`, where not given and there is one.")                             \
  X(int64_t, seq_len, 0, any(), "Tokens of one sequence.")                                                                                           \
  X(std::string, documents, "none", one_of("none, files, paragraphs, lines"),                                                                        \
    "What is a document: none (one stream of text), a file, a paragraph or a line; windows pack whole documents, and attention stays within each.")  \
  X(std::optional<bool>, bos, std::nullopt, unset("as a checkpoint that is gone on from; else with from_hf as its tokenizer files say; else false"), \
    "Each document (each file, where `documents` is none) and a prompt begin with the tokenizer's beginning-of-text id.")                            \
  X(bool, shuffle, true, any(), "Visit the windows in an order drawn from `seed`; false: in the order of the text.")                                 \
  X(std::optional<int64_t>, seed, std::nullopt, unset("run.seed"), "Seed of the order of windows.")                                                  \
  X(std::string, cache_dir, "", path(), "Where packed corpora are kept; empty: `tessera` in `$XDG_CACHE_HOME` or `~/.cache`.")

#define TESSERA_BATCH_FIELDS(X)                                                                                                             \
  X(int64_t, global_size, 0, any(), "Sequences per optimizer step, whatever the layout; a whole number of forward passes of `micro_size`.") \
  X(int64_t, micro_size, 1, any(), "Sequences per forward pass.")                                                                           \
  X(int64_t, per_rank, 0, any(),                                                                                                            \
    "Sequences of a data rank per optimizer step, in place of `global_size`, which is then this times the data ranks; 0: not given.")

#define TESSERA_LOSS_FIELDS(X)                                                                                                                         \
  X(double, label_smoothing, 0.0, any(), "Share of a target that is spread evenly over the vocabulary, in training; validation and `eval` have none.") \
  X(double, z_loss, 0.0, any(), "Weight of the squared log-sum-exp of the logits, in training; validation and `eval` have none.")

#define TESSERA_MOE_FIELDS(X)                                                                                                                         \
  X(double, capacity_factor, 0.0, any(), "Most tokens of an expert, in even shares of a forward pass, in training; more are dropped. 0: nothing is.") \
  X(double, balance_loss, 0.0, any(), "Weight of the term that evens the experts' load out, in training.")                                            \
  X(double, z_loss, 0.0, any(), "Weight of the squared log-sum-exp of the router's logits, in training.")                                             \
  X(double, bias_rate, 0.001, any(), "`model.router = sigmoid`: what a step adds to the bias of an expert below the mean load, or takes off above.")

#define TESSERA_OPTIM_FIELDS(X)                                                                                                                               \
  X(std::string, name, "adamw", one_of("adamw, sgd, lion, adafactor, adam8bit, muon"), "Optimizer (docs/optimizers.md).")                                     \
  X(double, lr, 0.0, any(), "Learning rate at the top of the schedule.")                                                                                      \
  X(Betas, betas, (Betas{0.9, 0.999}), any(), "Decay of the running averages of the gradient and of its square; Muon: of what AdamW updates beside it.")      \
  X(double, eps, 1e-8, any(), "Added to the denominator of AdamW; the root of the least squared gradient of Adafactor.")                                      \
  X(std::optional<double>, momentum, std::nullopt, unset("0; of Muon 0.95"),                                                                                  \
    "Momentum of SGD; of Muon; of an average of Adafactor's updates, which needs 4 bytes an element.")                                                        \
  X(double, weight_decay, 0.01, any(), "Weight decay (SGD: added to the gradient; all others: decoupled).")                                                   \
  X(std::string, decay_on, "all", one_of("all, matrices"), "Which parameters decay: all, or those of two and more dimensions.")                               \
  X(std::string, state_dtype, "fp32", one_of("fp32, bf16"), "Type in which the optimizer keeps its averages; bf16 is rounded stochastically.")                \
  X(int, ns_steps, 5, any(), "Newton-Schulz steps of Muon.")                                                                                                  \
  X(bool, split_heads, false, any(), "Muon takes the rows of each head of queries, keys and values for a matrix of its own.")                                 \
  X(std::vector<std::string>, groups, {}, any(),                                                                                                              \
    "Parameters that are treated otherwise: `pattern: key = value, ...` with the keys of this section that docs/optimizers.md lists; the first pattern that " \
    "matches counts.")                                                                                                                                        \
  X(double, max_grad_norm, 0.0, any(), "Gradients are scaled down to this global 2-norm; 0 is off.")                                                          \
  X(std::string, schedule, "constant", one_of("constant, linear, cosine"), "Learning rate after the warm-up, until `run.steps`.")                             \
  X(int64_t, warmup_steps, 0, any(), "Steps over which the learning rate rises linearly.")                                                                    \
  X(double, min_lr, 0.0, any(), "Learning rate at the end of a linear or cosine schedule.")

#define TESSERA_MESH_FIELDS(X)                                                                                            \
  X(std::optional<int>, dp_replicate, std::nullopt, unset("what the other axes leave where zero.stage = 0, else 1"),      \
    "Data parallelism with whole replicas; -1 takes what is left.")                                                       \
  X(std::optional<int>, dp_shard, std::nullopt, unset("what the other axes leave where zero.stage > 0, else 1"),          \
    "Data parallelism with sharded state; -1 takes what is left.")                                                        \
  X(int, pp, 1, any(), "Pipeline parallelism: stages of the model, each on ranks of its own.")                            \
  X(int, cp, 1, any(), "Context parallelism: ranks that each hold some columns of every sequence.")                       \
  X(int, tp, 1, any(), "Tensor parallelism: parts of a layer; -1 takes what is left.")                                    \
  X(int, ep, 1, any(), "Expert parallelism: experts are dealt over so many of the ranks of dp_shard x cp x tp.")          \
  X(int, expert_tp, 1, any(), "Ranks that share each expert, by rows of its width: the experts' own tensor parallelism.") \
  X(std::vector<std::string>, order, (std::vector<std::string>{"dp_replicate", "dp_shard", "pp", "cp", "tp"}), any(), "The axes, slowest links first.")

#define TESSERA_COMM_FIELDS(X)                                                                                                    \
  X(std::string, backend, "auto", one_of("auto, gloo, shm, mpi, nccl"), "What carries the collectives.")                          \
  X(std::string, algorithm, "auto", any(), "Collective algorithm; `auto`: the measured best of `table`, else the backend's own.") \
  X(std::string, table, "", path(), "Measured times of the algorithms, as `tessera bench comm` writes them; empty: none.")        \
  X(std::string, interface, "", own(), "Network interface or host name to bind to; empty: that which reaches the master.")        \
  X(double, timeout_s, 300.0, any(), "Seconds that a collective waits for its peers before it fails.")                            \
  X(bool, check, false, any(), "Compare operation, shape and dtype across ranks before every collective.")                        \
  X(std::string, compression, "none", one_of("none, bf16, fp16, powersgd"),                                                       \
    "How gradients cross the network in data parallelism; under `zero.stage` > 0 none, bf16 or fp16.")                            \
  X(int64_t, powersgd_rank, 4, any(), "Rank of PowerSGD's approximation of a gradient matrix.")                                   \
  X(int64_t, powersgd_start, 10, any(), "Steps before PowerSGD begins; gradients cross whole until then.")

#define TESSERA_ZERO_FIELDS(X)                                                                                  \
  X(int, stage, 0, any(), "What dp_shard shards: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters.") \
  X(int64_t, bucket_bytes, (int64_t{25} << 20), any(), "Bytes of gradients that are reduced together.")         \
  X(std::string, accumulate, "sharded", one_of("sharded, whole"),                                               \
    "Stages 2, 3: what is kept between micro-batches; `whole` reduces once a step, at stage 1's gradients.")    \
  X(std::string, wrap, "layers.*", any(), "Module paths that are gathered as one unit (stage 3).")              \
  X(int64_t, prefetch, 1, any(), "Units gathered ahead of their use (stage 3).")                                \
  X(int64_t, prefetch_bytes, 0, any(), "Bytes of those, together; 0: no limit (stage 3).")                      \
  X(bool, reshard_after_forward, true, any(), "Free a unit after its forward; false: gather it once a step (stage 3).")

#define TESSERA_TENSOR_FIELDS(X)                                                                                    \
  X(bool, sequence_parallel, false, any(), "Split the sequence between the layers that tensor parallelism splits.") \
  X(bool, keep_gathered, false, any(), "Keep what that gathers until backward, rather than gather it again.")       \
  X(bool, overlap, false, any(), "Overlap the collectives of tensor parallelism with its matrix products.")

#define TESSERA_CONTEXT_FIELDS(X)                                                                                                                        \
  X(std::string, method, "ring", one_of("ring, ulysses, ulysses_ring, ring_full, all_gather"),                                                           \
    "How attention reaches the keys and values of other ranks: in a ring, by an exchange of columns for heads, by both, in a ring of whole rows of "     \
    "scores, or gathered.")                                                                                                                              \
  X(int, ulysses, 0, any(), "`ulysses_ring`: neighbouring ranks of `mesh.cp` that exchange columns for heads; the ring goes across. Divides `mesh.cp`.") \
  X(std::string, balance, "auto", one_of("auto, head_tail, contiguous"),                                                                                 \
    "Which columns a rank holds: a part of the sequence's first half and its mirror image of the second, so that causal work is even, or one part; "     \
    "`auto`: one part where `model.sliding_window` is no longer than it, for work is then even, too.")

#define TESSERA_PIPELINE_FIELDS(X)                                                                                                                            \
  X(std::string, schedule, "1f1b",                                                                                                                            \
    path_or("naive, gpipe, 1f1b, pipedream, pipedream_2bw, interleaved, breadth_first, zb_h1, zb_h2, zb_v, dualpipev, v_half, v_min, zb_1p, zb_2p, zb_auto"), \
    "Schedule, or a CSV file that holds one.")                                                                                                                \
  X(std::vector<std::string>, split, (std::vector<std::string>{"auto"}), any(),                                                                               \
    "`auto` (as many links each), `cost` (as many FLOPs each), or how many links each stage has, or the links that begin the stages after the first.")        \
  X(int, virtual_stages, 1, any(), "Chunks of the model per rank; with `mesh.pp = 1`, too, where `breadth_first` takes a step layer by layer.")               \
  X(bool, vertical_sync, false, any(), "`pipedream`: a micro-batch uses on every stage the weights' version that it met on the first.")                       \
  X(int, per_update, 0, any(), "`pipedream_2bw`: micro-batches of a data rank that an update sums, at least one for each stage; 0: as few as that.")          \
  X(int, memory_limit, 0, any(), "Micro-batches whose activations a rank may hold at most (`zb_auto`).")                                                      \
  X(double, kept, 1, any(), "Share of a micro-batch's activations that is left when the gradients of its inputs are there (`zb_1p`, `zb_2p`, `zb_auto`).")    \
  X(std::vector<double>, costs, {}, any(),                                                                                                                    \
    "Of an average stage: forward, backward of inputs, of weights, and, if given, a message; `[]`: estimated from FLOPs (`zb_1p`, `zb_2p`, `zb_auto`, "       \
    "`plan`).")                                                                                                                                               \
  X(std::string, costs_from, "", path(),                                                                                                                      \
    "A run with `log.timeline_every`, or its `timeline.jsonl`: each stage costs what was measured there, in place of `costs`; empty: none.")                  \
  X(bool, post_validate, false, any(), "Update while the norm over all stages is on its way, and take it back where it clips or is not finite: the same bits.")

#define TESSERA_RECOMPUTE_FIELDS(X)                                                                                                                         \
  X(std::string, mode, "none", one_of("none, full, selective"),                                                                                             \
    "Which activations are computed again in backward; `selective`: attention cores, or, with `keep`, all but what these make.")                            \
  X(std::string, modules, "layers.*", any(), "Module paths that are recomputed, each as one.")                                                              \
  X(int64_t, every, 1, any(), "Recompute the first of every n of them.")                                                                                    \
  X(int64_t, segment, 0, any(),                                                                                                                             \
    "Keep the inputs of every n-th of them alone, and recompute from the last one kept (`full`, `every = 1`, `zero.stage` below 3); 0: each from its own.") \
  X(std::vector<std::string>, keep, {}, any(), "Operators whose outputs are kept, such as `aten::mm`.")                                                     \
  X(int64_t, budget_bytes, 0, any(), "Recompute only the cheapest set that brings what the modules keep of a micro-batch down to this; 0: all of them.")    \
  X(int64_t, ffn_tile, 0, any(),                                                                                                                            \
    "Tokens of a tile: feed-forward layers go through their tokens tile by tile, and compute each again in backward; 0: all at once.")

#define TESSERA_OFFLOAD_FIELDS(X)                                                                                                                        \
  X(ByPattern, params, {}, one_of("device, host, disk"),                                                                                                 \
    "Where slices of parameters live between uses: elsewhere than on the device needs `zero.stage = 3`, and all three.")                                 \
  X(ByPattern, gradients, {}, one_of("device, host, disk"),                                                                                              \
    "Where gradients are added up: below `zero.stage = 3` they go to the `host` while backward runs; else as `params`, whose patterns they follow.")     \
  X(ByPattern, optimizer, {}, one_of("device, host, disk"),                                                                                              \
    "Where the optimizer's state waits, at any `zero.stage`; unless it is said, with the patterns of `params`.")                                         \
  X(ByPattern, activations, {}, one_of("device, host, disk"),                                                                                            \
    "Where what modules save for backward waits: of the layers, or by pattern of the modules' paths.")                                                   \
  X(double, fraction, 1, any(), "Share of the modules that a pattern names, or of the layers of `activations` in one place, that are moved: the first.") \
  X(std::string, update, "host", one_of("host, device"),                                                                                                 \
    "Where parameters are updated whose state waits elsewhere: by the host's cores, or on the device, to which the state comes, piece by piece.")        \
  X(bool, delayed_update, false, any(), "The update of a step runs while the next one computes, which then uses weights of one update before.")          \
  X(int64_t, min_bytes, int64_t{1} << 20, any(), "Saved activations below stay on the device.")                                                          \
  X(int64_t, budget_bytes, 0, any(), "Most bytes of saved activations that are moved at a time; 0: no limit.")                                           \
  X(int64_t, prefetch, 1, any(), "Modules whose saved activations are fetched ahead of their backward; 0: each when it is asked for.")                   \
  X(std::string, dir, "", path(), "Folder of what lives on disk; empty: `offload` in `log.dir`.")

#define TESSERA_LORA_FIELDS(X)                                                                                                                             \
  X(std::string, modules, "", any(),                                                                                                                       \
    "Linear layers that learn by two thin matrices beside their frozen weight (LoRA); all else is frozen. Patterns of paths, separated by commas; empty: " \
    "none.")                                                                                                                                               \
  X(int64_t, rank, 8, any(), "Rows of those matrices.")                                                                                                    \
  X(double, alpha, 16, any(), "Their product is scaled by `alpha / rank`.")                                                                                \
  X(double, dropout, 0, any(), "Probability of dropping an element of their input while training.")                                                        \
  X(std::vector<std::string>, trained, {}, any(), "Parameters that are trained whole beside them, by pattern.")                                            \
  X(std::string, from_peft, "", path(), "Folder with an adapter in PEFT's format, as which the matrices begin; empty: one is drawn, the other is zero.")

#define TESSERA_QUANTIZE_FIELDS(X)                                                                                                                    \
  X(std::string, modules, "", any(), "Linear layers whose frozen weight is kept in fewer bits. Patterns of paths, separated by commas; empty: none.") \
  X(std::string, format, "nf4", one_of("nf4, int8"), "What an element is kept in.")                                                                   \
  X(int64_t, block, 64, any(), "Elements that share a scale.")                                                                                        \
  X(bool, double_scales, false, any(), "The scales are kept in 8 bits, 256 of which share one.")

#define TESSERA_PRECISION_FIELDS(X)                                                                                                                      \
  X(std::string, params, "fp32", one_of("fp32, bf16, fp16", "tf32, fp8"), "Type in which parameters are kept.")                                          \
  X(std::string, compute, "fp32", one_of("auto, fp32, tf32, bf16, fp16, fp8"),                                                                           \
    "Type of matrix products; `auto`: bf16 where the device multiplies it, else fp32.")                                                                  \
  X(std::string, reduce, "fp32", one_of("fp32, bf16, fp16", "tf32, fp8"), "Type in which gradients cross the network.")                                  \
  X(std::string, master, "fp32", one_of("fp32, bf16", "tf32, fp16, fp8"), "Type of the copy that the optimizer updates.")                                \
  X(std::string, fp8_scales, "tensor", one_of("tensor, row"), "What shares a scale in fp8 products.")                                                    \
  X(std::string, loss_scale, "none", number_or("none, dynamic"), "Factor on the loss, against underflow of small gradients; `dynamic` begins at 65536.") \
  X(int64_t, growth_steps, 2000, any(), "Finite steps in a row after which a dynamic loss scale doubles.")                                               \
  X(int64_t, max_skips, 20, any(), "So many steps in a row whose gradients are not finite end the run.")

#define TESSERA_CHECKPOINT_FIELDS(X)                                                                                                 \
  X(std::string, dir, "", path(), "Folder of the checkpoints; empty: none are written.")                                             \
  X(int64_t, every, 0, any(), "Steps between checkpoints; 0: only after the last step.")                                             \
  X(int64_t, keep, 0, any(), "How many of the newest checkpoints are kept; 0: all.")                                                 \
  X(bool, async, false, any(), "Write checkpoints while training goes on.")                                                          \
  X(int64_t, staging_bytes, int64_t{1} << 30, any(), "Host memory per rank for what `async` has yet to write.")                      \
  X(std::string, resume, "", path_or("latest"), "Checkpoint to go on from: a path, `latest` (the newest valid one), or empty.")      \
  X(bool, replace, false, any(), "A fresh start in a `dir` that holds another run's checkpoints sets these aside, within it.")       \
  X(std::vector<std::string>, partial, {}, any(), "Parameters, by pattern, that the checkpoint may lack, or hold beyond the model.") \
  X(bool, verify, true, any(), "Check the hash of every slice that is loaded, and replay the recorded step before going on.")

#define TESSERA_LOG_FIELDS(X)                                                                                                            \
  X(std::string, dir, "", path(), "Folder of metrics and saved configuration; empty: `runs/<file stem>` in the working directory.")      \
  X(bool, record, true, own(), "Keep each rank's last collectives in `record/`, for a verdict when a run hangs or crashes.")             \
  X(double, straggler_ratio, 1.2, any(), "A rank that computes this many times longer than the median of all ranks is named; 0 is off.") \
  X(int64_t, timeline_every, 0, any(), "Steps between timelines of the pipeline: when each action ran, in `timeline.jsonl`; 0: none.")   \
  X(double, peak_tflops, 0, own(), "TFLOP/s of a device at its best, of which `mfu` and `hfu` are shares; 0: not known, and neither is written.")

#define TESSERA_RUN_FIELDS(X)                                                                                                                                  \
  X(int64_t, steps, 0, any(), "Number of the last optimizer step.")                                                                                            \
  X(int64_t, seed, 0, any(), "Seed of initial weights and dropout.")                                                                                           \
  X(bool, deterministic, false, any(), "Sum gradients in one fixed order, so that the bits do not depend on the number of data ranks.")                        \
  X(std::optional<int>, threads, std::nullopt, unset("1 with `run.deterministic`; else `OMP_NUM_THREADS`; else cores / local ranks"), "Threads per rank.")     \
  X(ByPattern, kernels, "auto", one_of("auto, reference"), "Fused kernels, or their plain references: of all, or of each that a table names (`*`: the rest).") \
  X(std::string, device, "auto", own(),                                                                                                                        \
    "Where tensors live: `cpu`, `cuda` (each rank of a host the device of its number), `cuda:N`, or `auto`: CUDA where there is a device.")                    \
  X(bool, graph, false, any(), "Capture the steady step as a CUDA graph, and launch it as one.")                                                               \
  X(int64_t, validate_every, 0, any(), "Steps between validations; 0: none.")                                                                                  \
  X(int64_t, memory_limit_bytes, 0, own(), "Bytes of tensors that a rank may hold at once; an allocation beyond is refused. 0: no limit.")                     \
  X(std::string, batch_coupled, "refuse", one_of("refuse, report"),                                                                                            \
    "What happens when a module mixes the samples of a batch (BatchNorm) under several ranks or accumulation.")

/// Sections in the order of the documentation: X(struct, member, list of fields, doc).
#define TESSERA_CONFIG_SECTIONS(X)                                                                  \
  X(ModelConfig, model, TESSERA_MODEL_FIELDS, "The model's family and shape.")                      \
  X(DataConfig, data, TESSERA_DATA_FIELDS, "Text, tokenizer and the order of samples.")             \
  X(BatchConfig, batch, TESSERA_BATCH_FIELDS, "How many sequences make up a step.")                 \
  X(LossConfig, loss, TESSERA_LOSS_FIELDS, "The loss of a token, beside the cross-entropy.")        \
  X(MoeConfig, moe, TESSERA_MOE_FIELDS, "Training of a mixture of experts.")                        \
  X(OptimConfig, optim, TESSERA_OPTIM_FIELDS, "Optimizer, learning rate, clipping.")                \
  X(MeshConfig, mesh, TESSERA_MESH_FIELDS, "How the ranks are dealt over the axes of parallelism.") \
  X(CommConfig, comm, TESSERA_COMM_FIELDS, "Collectives.")                                          \
  X(ZeroConfig, zero, TESSERA_ZERO_FIELDS, "Sharded data parallelism.")                             \
  X(TensorConfig, tensor, TESSERA_TENSOR_FIELDS, "Tensor parallelism.")                             \
  X(ContextConfig, context, TESSERA_CONTEXT_FIELDS, "Context parallelism.")                         \
  X(PipelineConfig, pipeline, TESSERA_PIPELINE_FIELDS, "Pipeline parallelism.")                     \
  X(RecomputeConfig, recompute, TESSERA_RECOMPUTE_FIELDS, "Activation recomputation.")              \
  X(OffloadConfig, offload, TESSERA_OFFLOAD_FIELDS, "What waits outside the device.")               \
  X(LoraConfig, lora, TESSERA_LORA_FIELDS, "Training beside frozen weights.")                       \
  X(QuantizeConfig, quantize, TESSERA_QUANTIZE_FIELDS, "Frozen weights in fewer bits.")             \
  X(PrecisionConfig, precision, TESSERA_PRECISION_FIELDS, "Number formats.")                        \
  X(CheckpointConfig, checkpoint, TESSERA_CHECKPOINT_FIELDS, "Saving and resuming.")                \
  X(LogConfig, log, TESSERA_LOG_FIELDS, "Where a run leaves its records.")                          \
  X(RunConfig, run, TESSERA_RUN_FIELDS, "The run itself.")
