"""A byte-level GPT in plain PyTorch, small enough for two CPU cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """Size of the model. The default has 0.87 million parameters."""

    context: int = 64
    width: int = 128
    layers: int = 4
    heads: int = 4


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.inputs = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are ``[batch, time, width]``."""
        parts = self.inputs(x).unflatten(-1, (3, self.heads, -1))  # [batch, time, 3, head, width of a head]
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [batch, head, time, width of a head]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with layer normalization before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(shape)
        self.before_perceptron = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are ``[batch, time, width]``."""
        x = x + self.attention(self.before_attention(x))
        out: torch.Tensor = x + self.perceptron(self.before_perceptron(x))
        return out


class ByteGPT(nn.Module):
    """A GPT that predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.final = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialize)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats per byte of ``text``, int64 ``[batch, context + 1]``."""
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
