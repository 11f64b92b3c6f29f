"""Time and memory of a step: FSDP2 with and without resharding, torch's own graphs over whole weights, sessile with local
graphs, and eagerly.

    torchrun --nproc-per-node 2 examples/torch/fsdp2_comparison.py --case both --json figures.json

Same model, same precision: BF16 weights in products, BF16 gradients on the wire, FP32 weights and AdamW state, sharded.
sessile keeps norms and embeddings whole and reduces their gradients in one all-reduce; FSDP2 shards them.
`torch.cuda.make_graphed_callables` does not take FSDP2's modules, since they have hooks. It runs here over a model whose BF16
weights and gradients are whole on every rank: reduce-scatter of all gradients after the backward, optimizer over this rank's
part, all-gather of all weights, none of it in graphs and none of it beside the backward.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from typing import Dict

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpt import Shape, batch_of, build, loss_of  # noqa: E402
from train_gpt import Trainer, time_of  # noqa: E402


class Fsdp2:
    """The model under `fully_shard`: each block and the head, then the rest."""

    def __init__(self, shape: Shape, device: torch.device, reshard: bool) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.shape, self.device, self.rank = shape, device, dist.get_rank()
        self.model = build(shape, device, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for part in [*self.model.blocks, self.model.head]:
            fully_shard(part, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(self.model, mp_policy=policy, reshard_after_forward=reshard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self, number: int) -> torch.Tensor:
        """Forward and backward."""
        tokens, targets = batch_of(self.shape, self.rank, number, self.device)
        loss = loss_of(self.model(tokens), targets)
        loss.backward()
        return loss.detach()

    def finish(self) -> None:
        """The optimizer's part."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class Replicated:
    """Whole BF16 weights, each block and the head graphed by torch; gradients and optimizer state of this rank's part."""

    def __init__(self, shape: Shape, device: torch.device, graphs: bool = True) -> None:
        self.shape, self.device, self.rank, self.size = shape, device, dist.get_rank(), dist.get_world_size()
        self.model = build(shape, device, torch.bfloat16)
        parameters = list(self.model.parameters())
        part = -(-sum(p.numel() for p in parameters) // (self.size * 8)) * 8
        self.weights = torch.zeros(part * self.size, dtype=torch.bfloat16, device=device)
        self.grads = torch.zeros_like(self.weights)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            self.weights[start:end].copy_(parameter.detach().flatten())
            parameter.data = self.weights[start:end].view_as(parameter)
            parameter.grad = self.grads[start:end].view_as(parameter)
            start = end
        self.mine = self.weights[self.rank * part : (self.rank + 1) * part]
        self.reduced = torch.empty(part, dtype=torch.bfloat16, device=device)
        self.master = self.mine.float()
        self.master.grad = torch.zeros_like(self.master)
        self.optimizer = torch.optim.AdamW([self.master], lr=1e-3, fused=device.type == "cuda")
        self.calls = [*self.model.blocks, self.model.head]
        if graphs:
            x = torch.zeros(shape.batch, shape.sequence, shape.width, device=device, dtype=torch.bfloat16)
            samples = tuple((x.clone().requires_grad_(),) for _ in self.calls)
            self.calls = list(torch.cuda.make_graphed_callables(tuple(self.calls), samples))

    def step(self, number: int) -> torch.Tensor:
        """Forward, backward, and the reduction of all gradients."""
        tokens, targets = batch_of(self.shape, self.rank, number, self.device)
        y = self.model.embed(tokens)
        for call in self.calls:
            y = call(y)
        loss = loss_of(y, targets)
        loss.backward()
        dist.reduce_scatter_tensor(self.reduced, self.grads)
        self.master.grad.copy_(self.reduced).div_(self.size)
        return loss.detach()

    def finish(self) -> None:
        """The optimizer's part."""
        self.optimizer.step()
        self.mine.copy_(self.master)
        dist.all_gather_into_tensor(self.weights, self.mine.clone())
        self.grads.zero_()


def graph_fsdp2(shape: Shape, device: torch.device) -> Fsdp2:
    """FSDP2 with each block graphed by torch: says why that can't be."""
    trainer = Fsdp2(shape, device, True)
    x = torch.zeros(shape.batch, shape.sequence, shape.width, device=device, dtype=torch.bfloat16)
    parts = (*trainer.model.blocks, trainer.model.head)
    torch.cuda.make_graphed_callables(parts, tuple((x.clone().requires_grad_(),) for _ in parts))
    return trainer


def measure(trainer: object) -> Dict[str, float]:
    """Milliseconds a step, and memory: what stays between steps, and the peak; of the whole GPU what is used."""
    for number in range(5):
        trainer.step(number)
        trainer.finish()
    torch.cuda.synchronize()
    gc.collect()
    persistent = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step_ms = time_of(trainer, 5)
    free, total = torch.cuda.mem_get_info()
    return {
        "step_ms": step_ms,
        "persistent_mib": persistent / 2**20,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
        "gpu_used_mib": (total - free) / 2**20,
    }


CASES = {
    # Where launches dominate, and where products do.
    "small": Shape(layers=24, width=1024, heads=16, batch=1, sequence=256),
    "large": Shape(layers=8, width=4096, heads=32, batch=4, sequence=1024),
}


def ratios(results: Dict[str, Dict[str, float]]) -> Dict[str, Dict[str, float]]:
    """Of each that ran, against the faster FSDP2."""
    peers = [results[name] for name in ("fsdp2, reshard", "fsdp2, keep")]
    best = min(peers, key=lambda peer: peer["step_ms"])
    figures = ("step_ms", "persistent_mib", "peak_mib")
    ran = {name: result for name, result in results.items() if "step_ms" in result}
    return {name: {key: result[key] / best[key] for key in figures} for name, result in ran.items()}


def compare(options: argparse.Namespace, shape: Shape, device: torch.device) -> Dict[str, object]:
    """All of them on one shape, one after the other."""

    def sessile(graphs: bool) -> Trainer:
        trainer = Trainer(options, shape, device)
        if graphs:
            trainer.graph(True)
        return trainer

    makers = {
        "fsdp2, reshard": lambda: Fsdp2(shape, device, True),
        "fsdp2, keep": lambda: Fsdp2(shape, device, False),
        "fsdp2, torch graphs": lambda: graph_fsdp2(shape, device),
        "whole, torch graphs": lambda: Replicated(shape, device),
        "sessile, graphs": lambda: sessile(True),
    }
    if options.eager:
        makers["sessile, eager"] = lambda: sessile(False)
    results: Dict[str, Dict[str, float]] = {}
    for name, make in makers.items():
        trainer = None
        try:
            trainer = make()
            results[name] = measure(trainer)
        except (AssertionError, RuntimeError) as error:
            if name != "fsdp2, torch graphs":
                raise
            # torch refuses it on every rank before it has done anything.
            results[name] = {"cannot_run": " ".join(str(error).split())}
        if isinstance(trainer, Trainer) and trainer.storage.plan is not None:
            # torch's allocator does not see the plan's bytes.
            planned = trainer.storage.plan.bytes / 2**20
            results[name]["planned_mib"] = planned
            results[name]["persistent_mib"] += planned
            results[name]["peak_mib"] += planned
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
        if dist.get_rank() == 0:
            text = ", ".join(f"{k} {v:.2f}" if k != "cannot_run" else f"cannot run: {v}" for k, v in results[name].items())
            print(f"{name:20} {text}", flush=True)
    against = ratios(results)
    if dist.get_rank() == 0:
        print("against the faster FSDP2: step, persistent memory, peak")
        for name, ratio in against.items():
            print(f"{name:20} " + ", ".join(f"{value:.3f}" for value in ratio.values()), flush=True)
    return {"shape": vars(shape), "results": results, "against_faster_fsdp2": against}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, "both"], help="a preset; without it the sizes given below")
    parser.add_argument("--kind", default="auto")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--gather-bucket-mib", type=int, default=32, help="weights gathered by one call; 0: each alone")
    parser.add_argument("--eager", action="store_true", help="also sessile without graphs")
    parser.add_argument("--json", help="write figures to this file, after each case")
    Shape.arguments(parser)
    options = parser.parse_args()
    options.lr = 1e-3
    cases = {"sizes": Shape.of(options)}
    if options.case is not None:
        cases = {name: shape for name, shape in CASES.items() if options.case in (name, "both")}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    figures: Dict[str, object] = {}
    for name, shape in cases.items():
        if dist.get_rank() == 0:
            print(f"{name}: {shape}", flush=True)
        figures[name] = compare(options, shape, device)
        if options.json and dist.get_rank() == 0:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump({"ranks": dist.get_world_size(), "torch": torch.__version__, "cases": figures}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
