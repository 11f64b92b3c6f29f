"""Process groups as sessile compares plans over them."""

from __future__ import annotations

import os
from typing import Callable, List, Mapping, Optional, Tuple

import torch.distributed as dist

from ..errors import AgreementError, GroupError

#: Names the running system: equal in all processes of one machine, whatever its host name.
MACHINE = "/proc/sys/kernel/random/boot_id"

Gather = Optional[Callable[[bytes], List[bytes]]]


def ready() -> bool:
    """Whether there are other ranks to talk to."""
    return dist.is_available() and dist.is_initialized()


def ranks_of(group: Optional["dist.ProcessGroup"], name: str) -> List[int]:
    """World ranks of a group, in group order."""
    if not ready():
        return [0]
    if group is None:
        return list(range(dist.get_world_size()))
    if dist.get_rank(group) < 0:
        raise GroupError(
            f"this rank is no member of group `{name}`: give each rank the group that it belongs to", group=name
        )
    return list(dist.get_process_group_ranks(group))


def describe(group: Optional["dist.ProcessGroup"], name: str) -> Tuple[List[int], int, Gather]:
    """Ranks, this rank's position, and how bytes are all-gathered."""
    ranks = ranks_of(group, name)
    if len(ranks) == 1:
        return ranks, 0, None

    def gather(payload: bytes) -> List[bytes]:
        everybody: List[Optional[bytes]] = [None] * len(ranks)
        dist.all_gather_object(everybody, bytes(payload), group=group)
        return [part if part is not None else b"" for part in everybody]

    return ranks, dist.get_rank(group), gather


def is_near(group: Optional["dist.ProcessGroup"], name: str) -> bool:
    """Whether all ranks of a group are on one machine. Collective over it."""
    _, _, gather = describe(group, name)
    if gather is None:
        return True
    machine = b""
    if os.path.exists(MACHINE):
        with open(MACHINE, "rb") as file:
            machine = file.read()
    everybody = gather(machine)
    return machine != b"" and all(other == machine for other in everybody)


def agree(groups: Mapping[str, Optional["dist.ProcessGroup"]], what: str, value: str) -> None:
    """Refuses a value that is not the same on every rank of each group. Collective over them."""
    # All are asked before one is judged: who is refused in one group still answers in the other.
    answers = []
    for name, group in groups.items():
        ranks, _, gather = describe(group, name)
        everybody = [value] if gather is None else [other.decode() for other in gather(value.encode())]
        answers.append((name, ranks, everybody))
    for name, ranks, everybody in answers:
        for rank, found in zip(ranks, everybody):
            if found != everybody[0]:
                raise AgreementError(
                    f"{what} is {everybody[0]} on rank {ranks[0]} and {found} on rank {rank} of group `{name}`: give every rank "
                    "the same",
                    rank=rank,
                    group=name,
                    expected=everybody[0],
                    found=found,
                )
