"""Kinds of reduce-scatter: how a full gradient on every rank becomes a sum in this rank's ``main_grad``.

====================  =====================================================================================
``one_shot``          one launch reads every rank's block over NVLink, sums in FP32 in rank order, adds
``fp32_a2a``          all-to-all of the wire dtype into ``a2a_scratch``, FP32 sum in rank order in ``fp32_output``, added
``ring``              the process group's own reduce-scatter into ``rs_output`` in the wire dtype, then added
====================  =====================================================================================

The first two compute ``main_grad = main_grad + (scale * sum)``, each operation rounded in FP32. On the CPU blocks travel as
bytes over gloo, and ``ring`` rounds an FP32 sum once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional, Sequence

import torch
import torch.distributed as dist

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .shard import Weight

KINDS = ("auto", "one_shot", "fp32_a2a", "ring")
#: Ranks that can reduce in one shot.
ONE_SHOT_RANKS = 16


def choose(kind: str, size: int, near: bool) -> str:
    """The kind that a group gets. ``auto``: in one shot if all ranks are on one machine and not too many; else
    ``fp32_a2a`` above two ranks; else ``ring``, where a sum of two is rounded once."""
    if kind not in KINDS:
        raise ArgumentError(f"kind is {kind!r}: use one of {', '.join(KINDS)}", argument="kind", value=str(kind))
    if kind != "auto":
        return kind
    if near and size <= ONE_SHOT_RANKS:
        return "one_shot"
    return "fp32_a2a" if size > 2 else "ring"


def gather(full: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], weight: "Weight") -> None:
    """Every rank's shards, in rank order, each into its ``full``: of weights of one group and dtype, as ``weight`` is."""
    if weight.size == 1:
        for into, shard in zip(full, shards):
            into.copy_(shard)
    elif full[0].device.type == "cpu":
        for into, shard in zip(full, shards):
            _gather_bytes(list(into.chunk(weight.size)), shard, weight.group)
    elif len(full) == 1:
        dist.all_gather_into_tensor(full[0], shards[0], group=weight.group)
    else:
        gather_together(list(full), list(shards), weight.group)


def gather_together(
    full: List[torch.Tensor], shards: List[torch.Tensor], group: Optional["dist.ProcessGroup"]
) -> None:
    """All of them by one call, which NCCL may run as one kernel, on the current stream."""
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    work = (group or dist.group.WORLD).allgather_into_tensor_coalesced(full, shards, options)
    if work is not None:
        work.wait()


def exchange(scratch: torch.Tensor, send: torch.Tensor, weight: "Weight") -> None:
    """Block r of ``scratch`` becomes rank r's block of mine."""
    if send.device.type == "cpu":
        for into, block in zip(scratch.chunk(weight.size), _blocks(send, weight)):
            into.copy_(block)
    else:
        dist.all_to_all_single(scratch, send, group=weight.group)


def reduce_scatter(output: torch.Tensor, send: torch.Tensor, weight: "Weight") -> None:
    """The sum of every rank's block of mine, in the wire dtype."""
    if send.device.type == "cpu":
        blocks = [block.to(torch.float32) for block in _blocks(send, weight)]
        output.copy_(sum_in_order(torch.empty_like(blocks[0]), blocks))
    else:
        dist.reduce_scatter_tensor(output, send, group=weight.group)


def one_shot_on_cpu(send: torch.Tensor, weight: "Weight") -> None:
    """What the one-shot kernel does, over gloo."""
    blocks = _blocks(send, weight)
    add(weight, sum_in_order(torch.empty_like(weight.main_grad), blocks))


def sum_in_order(total: torch.Tensor, blocks: List[torch.Tensor]) -> torch.Tensor:
    """The FP32 sum of blocks, from the first on. Allocates nothing: it runs on beside graphs of the same pool."""
    total.copy_(blocks[0])
    for block in blocks[1:]:
        total.add_(block)
    return total


def add(weight: "Weight", total: torch.Tensor) -> None:
    """``main_grad = main_grad + (scale * total)``; ``total`` is used up."""
    weight.main_grad.add_(total.mul_(weight.scale))


def _blocks(send: torch.Tensor, weight: "Weight") -> List[torch.Tensor]:
    """Every rank's block of mine."""
    everybody = [send]
    if weight.size > 1:
        everybody = [torch.empty_like(send) for _ in range(weight.size)]
        _gather_bytes(everybody, send, weight.group)
    return [full.chunk(weight.size)[weight.rank] for full in everybody]


def _gather_bytes(parts: List[torch.Tensor], mine: torch.Tensor, group: Optional["dist.ProcessGroup"]) -> None:
    # gloo knows few dtypes; bytes are bytes.
    dist.all_gather([part.view(torch.uint8) for part in parts], mine.contiguous().view(torch.uint8), group=group)
