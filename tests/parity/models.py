"""Tiny Hugging Face models with random weights, made from their configurations alone."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

SEQ_LEN = 32
MAX_SEQ_LEN = 64  # more than SEQ_LEN, as published models have
WINDOW = 7
VOCAB_SIZE = 300  # more than the byte tokenizer's 256 ids


def llama(tied: bool) -> PreTrainedModel:
    """Grouped-query attention (6 heads on 2), an odd number of layers, a rotary base and an epsilon that are nobody's defaults."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=80,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=MAX_SEQ_LEN,
            rms_norm_eps=3e-6,
            rope_theta=5000.0,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def mistral() -> PreTrainedModel:
    """A window that is shorter than a sequence and divides nothing, in the way of transformers' masks."""
    return MistralForCausalLM(
        MistralConfig(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=80,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=MAX_SEQ_LEN,
            rms_norm_eps=3e-6,
            rope_theta=5000.0,
            sliding_window=WINDOW,
            use_cache=False,
        )
    )


def mixtral() -> PreTrainedModel:
    """More experts than a token visits by a number that divides nothing; with a window, too."""
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=40,
            num_local_experts=5,
            num_experts_per_tok=2,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=MAX_SEQ_LEN,
            rms_norm_eps=3e-6,
            rope_theta=5000.0,
            sliding_window=2 * WINDOW,
            use_cache=False,
        )
    )


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=48,
            n_layer=3,
            n_head=4,
            n_positions=MAX_SEQ_LEN,
            vocab_size=VOCAB_SIZE,
            layer_norm_epsilon=3e-6,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


@dataclass(frozen=True)
class Family:
    name: str
    build: callable
    norm: str  # one of its norms, for the planted bugs
    shard_size: str  # of the saved files; a small one makes an index and several files


FAMILIES = (
    Family("llama", lambda: llama(tied=False), "model.layers.1.post_attention_layernorm.weight", "100KB"),
    Family("llama tied", lambda: llama(tied=True), "model.layers.1.post_attention_layernorm.weight", "5GB"),
    Family("mistral", mistral, "model.layers.1.post_attention_layernorm.weight", "100KB"),
    Family("mixtral", mixtral, "model.layers.1.post_attention_layernorm.weight", "100KB"),
    Family("gpt2", gpt2, "transformer.h.1.ln_2.weight", "5GB"),
)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Every parameter away from its initial value: norms away from one and biases away from zero, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("weight") and parameter.dim() == 1
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.1 * noise)


def as_filed(tensors) -> dict[str, torch.Tensor]:
    """Tensors of a model's parameters under the names of its files: transformers stacks the experts that files hold one by one."""
    filed = {}
    for name, tensor in tensors:
        stem, _, kind = name.partition(".mlp.experts.")
        if not kind:
            filed[name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight")] = tensor
            continue
        for expert, weight in enumerate(tensor):
            prefix = f"{stem}.block_sparse_moe.experts.{expert}."
            if kind == "down_proj":
                filed[prefix + "w2.weight"] = weight
            else:
                filed[prefix + "w1.weight"], filed[prefix + "w3.weight"] = weight.chunk(2)
    return filed


def make(family: Family) -> PreTrainedModel:
    torch.manual_seed(0)
    model = family.build()
    randomise(model, seed=1)
    return model.eval()  # no dropout; the tiny models have none anyway


def save(family: Family, model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    model.to(dtype).save_pretrained(folder, max_shard_size=family.shard_size)


def load(folder: Path) -> PreTrainedModel:
    """The file's values in fp32, whatever type they are stored in."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
