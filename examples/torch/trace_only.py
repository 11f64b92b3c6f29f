"""Records what a training step asks for, on the CPU, and writes it as a trace for `sessile plan`, `compare`, `report`.

    python examples/torch/trace_only.py --layers 4 --out trace.json
    sessile plan trace.json
"""

import argparse

import torch
from torch import nn

import sessile
from sessile.torch import GraphStorage, make_graphed_callables, shard_


class Block(nn.Module):
    """A residual multi-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--out", default="trace.json")
    options = parser.parse_args()

    torch.manual_seed(0)
    blocks = [Block(options.width) for _ in range(options.layers)]
    storage = GraphStorage(device="cpu", name=f"{options.layers} blocks of width {options.width}")
    shard_(nn.ModuleList(blocks), storage=storage)
    sample = torch.randn(8, options.width, requires_grad=True)
    graphed = make_graphed_callables(blocks, [(sample,)], storage, chain=True)

    # One step over the planned views.
    x = sample
    for block in graphed:
        x = block(x)
    x.square().mean().backward()
    storage.join()

    storage.save_trace(options.out)
    with open(options.out, encoding="utf-8") as file:
        trace = file.read()
    print(f"{options.out}: trace {sessile.check_trace(trace)[:12]}")
    for strategy in ("sessile", "generations:2", "per-request"):
        plan = sessile.plan(trace, strategy=strategy)
        print(f"{strategy:14} {plan.bytes:10} bytes, {len(plan.fences)} fences")
    print(f"{'bound':14} {storage.plan.lower_bound_bytes:10} bytes")


if __name__ == "__main__":
    main()
