"""A small GPT, for the examples: blocks that are graphed one by one, and a head that may be used twice."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Shape:
    """Sizes of the model and of a rank's batch."""

    layers: int = 8
    width: int = 1024
    heads: int = 16
    vocab: int = 4096
    sequence: int = 256
    batch: int = 4
    experts: int = 0
    mtp: bool = False

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Adds an option for each size."""
        for name in ("layers", "width", "heads", "vocab", "sequence", "batch"):
            parser.add_argument(f"--{name}", type=int, default=getattr(Shape, name))
        parser.add_argument("--experts", type=int, default=0, help="experts in every other block; 0: none")
        parser.add_argument("--mtp", action="store_true", help="the output layer is used twice in a step")

    @staticmethod
    def of(options: argparse.Namespace) -> "Shape":
        """The sizes that were given."""
        names = ("layers", "width", "heads", "vocab", "sequence", "batch", "experts", "mtp")
        return Shape(**{name: getattr(options, name) for name in names})


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        split = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class Perceptron(nn.Module):
    """Two linear layers with a GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Expert(Perceptron):
    """A perceptron whose weights belong to the expert group."""

    is_expert = True


class Experts(nn.Module):
    """All experts see all tokens; a gate mixes them. Dense, so that shapes never change."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(shape.width, shape.experts) * 0.02)
        self.experts = nn.ModuleList([Expert(shape.width, shape.width) for _ in range(shape.experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mix = (x @ self.gate).softmax(-1)
        y = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            y = y + mix[..., at : at + 1] * expert(x)
        return y


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, shape: Shape, experts: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp = Experts(shape) if experts else Perceptron(shape.width, 4 * shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Norm and output layer; with MTP a second prediction through the same output layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocab, bias=False)
        self.ahead = nn.Linear(shape.width, shape.width, bias=False) if shape.mtp else None

    def forward(self, x: torch.Tensor) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
        x = self.norm(x)
        logits = self.output(x)
        return logits if self.ahead is None else (logits, self.output(x + torch.tanh(self.ahead(x))))


class GPT(nn.Module):
    """Embeddings, blocks, head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Parameter(torch.randn(shape.sequence, shape.width) * 0.02)
        self.blocks = nn.ModuleList([Block(shape, shape.experts > 0 and at % 2 == 1) for at in range(shape.layers)])
        self.head = Head(shape)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens as vectors."""
        return self.tokens(tokens) + self.positions

    def forward(self, tokens: torch.Tensor) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model with the weights that every rank has, made where they will lie: on a CPU that takes minutes for large ones."""
    torch.manual_seed(11)
    with device if device.type == "cuda" else nullcontext():
        model = GPT(shape)
    return model.to(device=device, dtype=dtype)


def loss_of(answer: Union[torch.Tensor, Tuple[torch.Tensor, ...]], targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token; with MTP also of the one after it."""
    answers = answer if isinstance(answer, tuple) else (answer,)
    total = torch.zeros((), device=targets.device)
    for ahead, logits in enumerate(answers):
        rolled = targets.roll(-ahead, 1)
        total = total + F.cross_entropy(logits.float().flatten(0, 1), rolled.flatten())
    return total


def batch_of(shape: Shape, rank: int, step: int, device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a rank in a step: arithmetic sequences, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    start = torch.randint(shape.vocab, (shape.batch, 1), generator=generator)
    stride = torch.randint(1, 8, (shape.batch, 1), generator=generator)
    tokens = (start + stride * torch.arange(shape.sequence + 1)) % shape.vocab
    tokens = tokens.to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
