"""Kinds of reduce-scatter: how a full gradient on every rank becomes a sum in this rank's ``main_grad``.

====================  =====================================================================================
``one_shot``          one launch reads every rank's block over NVLink, sums in FP32 in rank order, adds
``fp32_a2a``          all-to-all of the wire dtype, local FP32 sum in rank order, added
``ring``              the process group's own reduce-scatter in the wire dtype, then added
====================  =====================================================================================

On the CPU all kinds gather bytes over gloo and sum in FP32 in rank order; the arithmetic is that of ``one_shot``:
``main_grad = main_grad + (scale * sum)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional

import torch
import torch.distributed as dist

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .shard import Weight

KINDS = ("auto", "one_shot", "fp32_a2a", "ring")


def choose(kind: str, size: int, device: torch.device) -> str:
    """The kind that a group gets. ``auto`` reduces in one shot up to 16 ranks, since the wire dtype is summed in FP32
    there without scratch; above, it uses ``fp32_a2a``."""
    if kind not in KINDS:
        raise ArgumentError(f"kind is {kind!r}: use one of {', '.join(KINDS)}", argument="kind", value=str(kind))
    if kind != "auto":
        return kind
    return "one_shot" if size <= 16 else "fp32_a2a"


def gather(full: torch.Tensor, shard: torch.Tensor, weight: "Weight") -> None:
    """Every rank's shard, in rank order, into ``full``."""
    if weight.size == 1:
        full.copy_(shard)
    elif full.device.type == "cpu":
        _gather_bytes(list(full.chunk(weight.size)), shard, weight.group)
    else:
        dist.all_gather_into_tensor(full, shard, group=weight.group)


def _gather_bytes(parts: List[torch.Tensor], mine: torch.Tensor, group: Optional["dist.ProcessGroup"]) -> None:
    # gloo knows few dtypes; bytes are bytes.
    dist.all_gather([part.view(torch.uint8) for part in parts], mine.contiguous().view(torch.uint8), group=group)


def reduce_on_cpu(weight: "Weight", send: torch.Tensor) -> None:
    """The pinned arithmetic over gloo."""
    everybody = [torch.empty_like(send) for _ in range(weight.size)]
    if weight.size > 1:
        _gather_bytes(everybody, send, weight.group)
    else:
        everybody = [send]
    add_blocks(weight.main_grad, [full.chunk(weight.size)[weight.rank] for full in everybody], weight.scale)


def add_blocks(main_grad: torch.Tensor, blocks: List[torch.Tensor], scale: float) -> None:
    """``main_grad = main_grad + (scale * sum)``: FP32, in rank order, each operation rounded."""
    total = blocks[0].to(torch.float32)
    for block in blocks[1:]:
        total = total + block.to(torch.float32)
    main_grad.add_(total.mul_(scale).view_as(main_grad))
