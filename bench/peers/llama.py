"""The peer's model: Hugging Face's LLaMA from a recipe, with its loss inside, so that DDP and torch.compile see the whole forward pass."""

import torch
import torch.nn.functional as F
from recipe import Recipe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
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
