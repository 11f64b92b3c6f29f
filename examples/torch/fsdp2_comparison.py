"""Time and memory of a step: FSDP2 with and without resharding, sessile with local graphs, and eagerly.

    torchrun --nproc-per-node 2 examples/torch/fsdp2_comparison.py --layers 24 --width 1024 --batch 1

Same model, same precision: BF16 weights in products, BF16 gradients on the wire, FP32 weights and AdamW state, sharded.
sessile keeps norms and embeddings whole and reduces their gradients in one all-reduce; FSDP2 shards them.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="auto")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="also sessile without graphs")
    parser.add_argument("--json", help="write figures to this file")
    Shape.arguments(parser)
    options = parser.parse_args()
    options.lr, shape = 1e-3, Shape.of(options)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    def sessile(graphs: bool) -> Trainer:
        trainer = Trainer(options, shape, device)
        if graphs:
            trainer.graph(True)
        return trainer

    makers = {
        "fsdp2, reshard": lambda: Fsdp2(shape, device, True),
        "fsdp2, keep": lambda: Fsdp2(shape, device, False),
        "sessile, graphs": lambda: sessile(True),
    }
    if options.eager:
        makers["sessile, eager"] = lambda: sessile(False)
    results = {}
    for name, make in makers.items():
        trainer = make()
        results[name] = measure(trainer)
        if isinstance(trainer, Trainer) and trainer.storage.plan is not None:
            results[name]["planned_mib"] = trainer.storage.plan.bytes / 2**20
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
        if dist.get_rank() == 0:
            figures = ", ".join(f"{key} {value:.2f}" for key, value in results[name].items())
            print(f"{name:16} {figures}", flush=True)
    best = min(results["fsdp2, reshard"]["step_ms"], results["fsdp2, keep"]["step_ms"])
    if dist.get_rank() == 0:
        print(f"graphs against the best of FSDP2: {results['sessile, graphs']['step_ms'] / best:.3f}")
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump({"shape": vars(shape), "results": results}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
