"""The models: a small Llama of our own, for which plans of tensor parallelism are easy to write, and some of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Row = dict[str, Any]


class Attention(nn.Module):
    """Self-attention with grouped heads."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.size, bias=False)
        self.wv = nn.Linear(width, groups * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q, k, v = (layer(x).view(batch, length, -1, self.size).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, middle, bias=False), nn.Linear(width, middle, bias=False)
        self.w2 = nn.Linear(middle, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, width: int, heads: int, groups: int, middle: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads, groups), FeedForward(width, middle)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        width = row["width"]
        self.tok_embeddings = nn.Embedding(row["vocabulary"], width)
        sizes = (width, row["heads"], row["groups"], row["middle"])
        self.layers = nn.ModuleList(Block(*sizes) for _ in range(row["layers"]))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, row["vocabulary"], bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def build(row: Row) -> tuple[nn.Module, type[nn.Module]]:
    """The model on the device that is current, and the class of its blocks."""
    if row["model"] == "own":
        return Transformer(row), Block
    import transformers
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    heads = {"num_attention_heads": row["heads"], "num_key_value_heads": row["groups"]}
    sizes = {"hidden_size": row["width"], "num_hidden_layers": row["layers"], "intermediate_size": row["middle"]}
    common: Row = {"vocab_size": row["vocabulary"], "use_cache": False}
    if row["model"] == "llama":
        made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **heads, **sizes))
        return made, LlamaDecoderLayer
    if row["model"] == "qwen2":
        made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common, **heads, **sizes))
        return made, Qwen2DecoderLayer
    config = transformers.GPT2Config(
        **common, n_embd=row["width"], n_layer=row["layers"], n_head=row["heads"], n_positions=row["length"]
    )
    return transformers.GPT2LMHeadModel(config), GPT2Block


def checkpoint_blocks(model: nn.Module, block: type[nn.Module]) -> None:
    """Have the blocks of a model keep their inputs alone."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, block))
