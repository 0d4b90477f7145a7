#pragma once

/// The public surface of tessera. What is not included here may change without notice.

// Errors, configuration, attachments, memory accounting.
#include "tessera/core/attachment.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/core/memory.h"
#include "tessera/core/memory_history.h"
#include "tessera/core/rng.h"
#include "tessera/core/version.h"
#include "tessera/layout/slice.h"

// Fused operators.
#include "tessera/kernels/attention.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/dropout.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/kernels/rope.h"
#include "tessera/kernels/swiglu.h"

// Communication.
#include "tessera/comm/algorithms/picture.h"
#include "tessera/comm/algorithms/plan.h"
#include "tessera/comm/algorithms/simulate.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/differentiable.h"
#include "tessera/comm/world.h"
#include "tessera/mesh/mesh.h"

// Modules and models.
#include "tessera/models/generate.h"
#include "tessera/models/model.h"
#include "tessera/models/parallel_plans.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/contrastive_loss.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/module.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/saved_tensors.h"
#include "tessera/nn/sync_batch_norm.h"

// Data.
#include "tessera/data/corpus.h"
#include "tessera/data/loader.h"
#include "tessera/data/sequential_loader.h"
#include "tessera/data/tokenizer.h"

// Techniques and optimizers.
#include "tessera/data_parallel/batch_coupling.h"
#include "tessera/data_parallel/communication_hook.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/power_sgd.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip.h"
#include "tessera/optim/schedule.h"
#include "tessera/optim/sgd.h"
#include "tessera/precision/loss_scale.h"
#include "tessera/precision/master_weights.h"
#include "tessera/precision/policy.h"
#include "tessera/recompute/budget.h"
#include "tessera/recompute/recompute.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/zero/sharded_data_parallel.h"

// Checkpoints, training, planning, launching.
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/checkpoint/saver.h"
#include "tessera/launch/local.h"
#include "tessera/plan/dry_run.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/load_model.h"
#include "tessera/train/trainer.h"
#include "tessera/verify/verify.h"
