"""Trains a small GPT with sharded weights, eagerly and with local graphs, and compares every bit.

    torchrun --nproc-per-node 2 examples/torch/train_gpt.py --steps 200 --compare
    torchrun --nproc-per-node 2 examples/torch/train_gpt.py --steps 200 --compare --iteration

Without a GPU it runs on the CPU over gloo, with small sizes:

    torchrun --nproc-per-node 2 examples/torch/train_gpt.py --device cpu --steps 3 --compare \\
        --layers 2 --width 64 --heads 4 --vocab 64 --sequence 16
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from typing import Callable, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpt import GPT, Shape, batch_of, build, loss_of  # noqa: E402

from sessile.torch import GraphStorage, Sharded, ShardedParameter, make_graphed_callables, shard_  # noqa: E402


class Trainer:
    """One model with its optimizer: FP32 copies of the weights, AdamW over them."""

    def __init__(self, options: argparse.Namespace, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = build(shape, device, dtype)
        expert_group = dist.new_group(list(range(self.size)))
        self.storage = GraphStorage(device=device, depth=options.depth)
        self.sharded: Sharded = shard_(
            self.model,
            dist.group.WORLD,
            expert_group=expert_group,
            storage=self.storage,
            kind=options.kind,
            gather_bucket_bytes=options.gather_bucket_mib << 20,
        )
        self.whole = [p for p in self.model.parameters() if not isinstance(p, ShardedParameter)]
        self.weights = [w.parameter for w in self.sharded.weights]
        self.masters = [p.detach().float().clone() for p in [*self.weights, *self.whole]]
        for master, parameter in zip(self.masters, self.weights):
            master.grad = parameter.sharded.main_grad
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.masters, lr=options.lr, fused=cuda, capturable=cuda)
        # No step on gradients that are not whole.
        self.guard = self.sharded.guard(self.optimizer)
        self.forward: Callable[[torch.Tensor], object] = self.model
        #: With one graph for all of a step: its launch, what it reads, what it leaves.
        self.launch: Optional[Callable[[], None]] = None
        self.batch: List[torch.Tensor] = []
        self.loss, self.noted = torch.zeros(()), torch.zeros(())

    def graph(self, overlap: bool) -> None:
        """Captures every block and the head as local graphs."""
        x = torch.zeros(
            self.shape.batch, self.shape.sequence, self.shape.width, device=self.device, dtype=self.whole[0].dtype
        )
        modules: List[nn.Module] = [*self.model.blocks, self.model.head]
        calls = make_graphed_callables(
            modules, [(x.requires_grad_(),)], self.storage, chain=True, overlap=overlap, random=False
        )

        def forward(tokens: torch.Tensor) -> object:
            y = self.model.embed(tokens)
            for call in calls:
                y = call(y)
            return y

        self.forward = forward

    def graph_iteration(self) -> None:
        """Captures forward, backward, reductions and optimizer as one graph, which is one runner of the storage."""
        # The host can't refuse a step that is inside a graph: `run` checks behind launches.
        self.guard.remove()
        self.batch = list(batch_of(self.shape, self.rank, 0, self.device))
        kept = [*self.weights, *self.whole, *self.masters]
        before = [tensor.detach().clone() for tensor in kept]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Eagerly, the gathers learn their order and the optimizer makes its state; then all is as it was.
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(2):
                with torch.enable_grad():
                    self._iteration()
            torch._foreach_copy_(kept, before)
            for state in self.optimizer.state.values():
                torch._foreach_zero_(list(state.values()))
        torch.cuda.synchronize()
        for scope in (self.storage.discover, self.storage.capture):
            if scope == self.storage.capture:
                self.storage.seal()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                with scope("iteration"):
                    self._iteration()
        self.launch = self.storage.launcher("iteration", graph)

    def _iteration(self) -> None:
        self.loss = self._step(*self.batch)
        self.noted = self._bits()
        self._finish()

    def step(self, number: int) -> torch.Tensor:
        """One step; its loss, still on the device."""
        tokens, targets = batch_of(self.shape, self.rank, number, self.device)
        if self.launch is None:
            return self._step(tokens, targets)
        torch._foreach_copy_(self.batch, [tokens, targets])
        self.launch()
        return self.loss.clone()

    def _step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.forward(tokens), targets)
        loss.backward()
        self.sharded.join()
        self._reduce_whole()
        return loss.detach()

    def finish(self) -> None:
        """The optimizer's part of a step; it is in the graph if that holds all of it."""
        if self.launch is None:
            self._finish()

    def _finish(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*self.weights, *self.whole], self.masters)
        self.sharded.zero_grad()
        for parameter in self.whole:
            parameter.grad = None

    def _reduce_whole(self) -> None:
        flat = torch.cat([p.grad.flatten() for p in self.whole])
        dist.all_reduce(flat)
        flat = flat.float() / self.size
        parts = flat.split([p.numel() for p in self.whole])
        for master, part in zip(self.masters[len(self.weights) :], parts):
            master.grad = part.view_as(master)

    def bits(self) -> torch.Tensor:
        """One number a weight: the sum of its gradient's bits."""
        return self._bits() if self.launch is None else self.noted.clone()

    def _bits(self) -> torch.Tensor:
        return torch.stack([master.grad.view(torch.int32).sum(dtype=torch.int64) for master in self.masters])


def run(trainer: Trainer, steps: int, say: Callable[[str], None], name: str) -> Dict[str, object]:
    """Trains; losses, bits of gradients, the last gradients; then the time of a step, over further steps."""
    losses, bits, last = [], [], []
    cuda = trainer.device.type == "cuda"
    for number in range(steps):
        losses.append(trainer.step(number))
        bits.append(trainer.bits())
        if number == steps - 1 and trainer.launch is None:
            last = [p.sharded.main_grad.clone() for p in trainer.weights]
        trainer.finish()
        if number % max(1, steps // 10) == 0 or number == steps - 1:
            # What is told from here on rests on whole gradients, or raises.
            trainer.sharded.check()
            say(f"{name:7} step {number:4}  loss {float(losses[-1]):.6f}")
    return {
        "losses": torch.stack(losses),
        "bits": torch.stack(bits),
        "last": last,
        "step_ms": time_of(trainer, steps),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }


def time_of(trainer: Trainer, first: int, steps: int = 20) -> float:
    """Milliseconds of a step: the best of three rounds, which all ranks begin together. The optimizer is part of it."""
    best = float("inf")
    for _ in range(3):
        if trainer.device.type != "cuda":
            steps = 2
        dist.barrier()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(steps):
            trainer.step(first + number)
            trainer.finish()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, 1000 * (time.perf_counter() - begin) / steps)
    return best


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compare", action="store_true", help="also train eagerly, and compare bits")
    parser.add_argument("--eager", action="store_true", help="train eagerly only")
    parser.add_argument("--iteration", action="store_true", help="one graph for all of a step (CUDA)")
    parser.add_argument("--kind", default="auto", help="auto, one_shot, fp32_a2a or ring")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--gather-bucket-mib", type=int, default=32, help="weights gathered by one call; 0: each alone")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trace", help="write what was discovered to this file")
    parser.add_argument("--json", help="write figures to this file")
    Shape.arguments(parser)
    options = parser.parse_args(arguments)
    shape = Shape.of(options)

    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # The same kernels in both runs; without this, some of torch's own add in any order.
    torch.use_deterministic_algorithms(True, warn_only=True)

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    results = {}
    trainer: Optional[Trainer] = None
    if options.compare or options.eager:
        results["eager"] = run(Trainer(options, shape, device), options.steps, say, "eager")
    if not options.eager:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(options, shape, device)
        if options.iteration:
            trainer.graph_iteration()
        else:
            trainer.graph(not options.no_overlap)
        results["graphs"] = run(trainer, options.steps, say, "graphs")
        plan = trainer.storage.plan
        say(
            f"planned {plan.bytes} bytes (bound {plan.lower_bound_bytes}), {len(plan.fences)} fences, "
            f"{trainer.storage.order_deviations} launches out of order, kind {trainer.sharded.weights[0].kind}"
        )
        if options.trace and dist.get_rank() == 0:
            trainer.storage.save_trace(options.trace)
    for name, result in results.items():
        say(f"{name:7} {result['step_ms']:.3f} ms a step, peak {result['peak_bytes'] / 2**20:.0f} MiB of torch's allocator")

    good = True
    if options.compare:
        a, b = results["eager"], results["graphs"]
        losses = int((a["losses"] == b["losses"]).sum())
        steps = int((a["bits"] == b["bits"]).all(1).sum())
        last = all(torch.equal(x, y) for x, y in zip(a["last"], b["last"]))
        good = losses == steps == options.steps and last
        verdict = torch.tensor([int(good)], device=device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        good = bool(verdict.item())
        sharded = "not kept" if options.iteration else "equal" if last else "DIFFER"
        say(
            f"losses equal in {losses} of {options.steps} steps, bits of all gradients in {steps} of {options.steps}, "
            f"last sharded gradients {sharded}; on all ranks: {'equal' if good else 'DIFFER'}"
        )
    if options.json and dist.get_rank() == 0:
        figures = {name: {"step_ms": r["step_ms"], "peak_bytes": r["peak_bytes"]} for name, r in results.items()}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"equal": good if options.compare else None, **figures}, file, indent=1)
    # NCCL waits for graphs that hold its communicators.
    trainer = None
    gc.collect()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(main())
