"""The peer's model: Hugging Face's LLaMA from a recipe, with its loss inside, so that DDP and torch.compile see the whole forward pass."""

import torch
import torch.nn.functional as F
from recipe import Recipe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

LOSSES = ("whole", "chunked")


class LlamaLoss(torch.nn.Module):
    """(tokens, labels), both int64 [B, S] -> mean cross-entropy.

    loss = "whole":   Hugging Face's own loss: all logits at once, in fp32.
    loss = "chunked": torch.nn.functional.linear_cross_entropy: logits of one chunk of tokens at a time, gradients computed in the forward pass.
                      Chunks of 512 tokens and the "balanced" policy were the fastest of those tried on CPU; its defaults make a bf16 step five times slower.
    """

    def __init__(self, recipe: Recipe, loss: str):
        super().__init__()
        config = LlamaConfig(
            hidden_size=recipe.dim,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            intermediate_size=recipe.ffn_dim,
            vocab_size=recipe.vocab_size,
            max_position_embeddings=recipe.seq_len,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.llama = LlamaForCausalLM(config)
        self.cut_over_ranks = False
        self.chunking = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512, chunking_method=None, acc_policy="balanced") if loss == "chunked" else None

    def recompute_blocks(self, on: bool = True) -> None:
        """Puts torch.utils.checkpoint around every block, in its non-reentrant form, or takes it away."""
        if on:
            self.llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.llama.gradient_checkpointing_disable()

    def shard(self, ranks: int) -> None:
        """FSDP2: every block by itself, and the rest in one."""
        mesh = init_device_mesh("cpu", (ranks,))
        for block in self.llama.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def cut(self, ranks: int, sequence_parallel: bool) -> None:
        """PyTorch's own tensor parallelism, as its tutorials lay it out: every block's projections column- and row-wise, embedding and head by vocabulary. What
        goes into a part stays a DTensor, so that the gradients of its projections are summed over ranks once and not one by one."""
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        stream = Shard(1) if sequence_parallel else Replicate()
        rows, columns = (lambda: RowwiseParallel(output_layouts=stream)), ColwiseParallel
        norms = {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()} if sequence_parallel else {}
        block = {
            "self_attn": PrepareModuleInput(input_kwarg_layouts={"hidden_states": stream}, desired_input_kwarg_layouts={"hidden_states": Replicate()}),
            "self_attn.q_proj": columns(),
            "self_attn.k_proj": columns(),
            "self_attn.v_proj": columns(),
            "self_attn.o_proj": rows(),
            "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
            "mlp.gate_proj": columns(),
            "mlp.up_proj": columns(),
            "mlp.down_proj": rows(),
        }
        for layer in self.llama.model.layers:
            parallelize_module(layer, mesh, block | norms)
        around = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(self.llama, mesh, around | ({"model.norm": SequenceParallel()} if sequence_parallel else {}))
        self.cut_over_ranks = True

    def stage(self, rank: int, ranks: int, blocks: int) -> "LlamaStage":
        """Of two: the embedding with the first `blocks` blocks, or the other blocks with norm and head."""
        if ranks != 2 or not 0 < blocks <= len(self.llama.model.layers):
            raise SystemExit(f"--split {blocks}: the pipeline has two stages, and {len(self.llama.model.layers)} blocks to deal; give a number up to that")
        return LlamaStage(self.llama, first=rank == 0, blocks=blocks)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.cut_over_ranks:  # logits stay cut by vocabulary: the caller is inside of loss_parallel()
            positions = torch.arange(tokens.shape[1])[None]  # the hidden states may be a part of the sequence and do not tell
            logits = self.llama.lm_head(self.llama.model(input_ids=tokens, position_ids=positions).last_hidden_state)
            return loss_of(logits, labels)
        if self.chunking is None:
            return self.llama(input_ids=tokens, labels=labels, shift_labels=labels).loss
        hidden = self.llama.model(input_ids=tokens).last_hidden_state.flatten(0, 1)
        weight = self.llama.lm_head.weight
        # Autocast does not reach into this operator, so its operands get the compute type here.
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        with torch.autocast("cpu", enabled=False):
            return F.linear_cross_entropy(hidden, weight, labels.flatten(), options=self.chunking)


class LlamaStage(torch.nn.Module):
    """A stage of a pipeline (torch.distributed.pipelining): tokens -> the residual stream, or that -> logits."""

    def __init__(self, llama: LlamaForCausalLM, first: bool, blocks: int):
        super().__init__()
        self.model, self.first = llama.model, first
        layers = llama.model.layers
        self.model.layers = layers[:blocks] if first else layers[blocks:]
        self.model.config.num_hidden_layers = len(self.model.layers)
        if first:
            self.model.norm = torch.nn.Identity()
        else:
            self.model.embed_tokens = None
            self.lm_head = llama.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            return self.model(input_ids=x).last_hidden_state
        return self.lm_head(self.model(inputs_embeds=x).last_hidden_state)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
