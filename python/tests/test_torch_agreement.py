"""Agreement over gloo: what ranks find out about each other before anything is allocated."""

import torch
import torch.distributed as dist
from torch import nn

import ranks
import sessile
from sessile.torch import GraphStorage, ShardedParameter, shard_


def _discover(storage, rows, group="dp"):
    with storage.discover("layer0"):
        storage.empty((rows, 16), torch.bfloat16, role="wgrad_input", weight="w", group=group, symmetric=True)


def _fields(error):
    return (type(error).__name__, error.rank, error.runner, error.index, error.expected, error.found)


def _agree(rank):
    storage = GraphStorage(device="cpu", groups={"dp": dist.group.WORLD})
    _discover(storage, 8)
    return storage.seal().digest


def _differ(rank):
    storage = GraphStorage(device="cpu", groups={"dp": dist.group.WORLD})
    _discover(storage, 9 if rank == 2 else 8)
    try:
        storage.seal()
    except sessile.AgreementError as error:
        first = _fields(error)
    # Nothing was kept: the same storage can agree.
    storage.restart_discovery()
    _discover(storage, 8)
    return first, storage.seal().bytes


def _options(rank):
    storage = GraphStorage(device="cpu", groups={"dp": dist.group.WORLD}, depth=1 + rank)
    _discover(storage, 8)
    try:
        storage.seal()
    except sessile.AgreementError as error:
        return error.rank, "depth" in error.found


def _groups(rank):
    members = [[0, 1], [2]]
    made = [dist.new_group(part) for part in members]
    mine = made[0 if rank < 2 else 1]
    other = made[1 if rank < 2 else 0]
    try:
        GraphStorage(device="cpu", groups={"other": other})
        wrong = None
    except sessile.GroupError as error:
        wrong = error.group
    # The last rank has a group of its own, and other shapes in it.
    storage = GraphStorage(device="cpu", groups={"dp": mine})
    _discover(storage, 8 if rank < 2 else 32, group=mine)
    return wrong, storage.seal().bytes


def _one_fails(rank):
    storage = GraphStorage(device="cpu", groups={"dp": dist.group.WORLD})
    if rank != 1:
        _discover(storage, 8)
    try:
        storage.seal()
    except sessile.SessileError as error:
        return type(error).__name__, str(error)


def _all(rank):
    return [_agree(rank), _differ(rank), _options(rank), _groups(rank), _one_fails(rank)]


def test_ranks_agree_or_all_learn_who_differs():
    first, second, third = ranks.run(_all, 3)
    assert first[0] == second[0] == third[0]

    for answer in (first, second, third):
        (name, rank, runner, index, expected, found), size = answer[1]
        assert (name, rank, runner, index) == ("AgreementError", 2, "layer0", 0)
        assert "bf16[8, 16]" in expected and "bf16[9, 16]" in found
        assert size == 256

    assert first[2] == second[2] == third[2] == (1, True)
    assert [answer[3] for answer in (first, second, third)] == [("other", 256), ("other", 256), ("other", 1024)]
    # The rank that discovered nothing has its own reason, the others its rank.
    assert second[4][0] == "TraceError"
    assert first[4][0] == third[4][0] == "AgreementError" and "rank 1" in first[4][1]


def _buckets(rank):
    """Two ranks that differ, in a group that both are in; then each in a group of its own; then with equal numbers."""

    def shard(group, limit):
        net = nn.Sequential(nn.Linear(4, 4))
        try:
            shard_(net, group, storage=GraphStorage(device="cpu"), gather_bucket_bytes=limit)
        except sessile.AgreementError as error:
            assert not any(isinstance(parameter, ShardedParameter) for parameter in net.parameters())
            return error.rank, error.group, error.expected, error.found, str(error)

    alone = [dist.new_group([at]) for at in range(2)][rank]
    return shard(dist.group.WORLD, 64 << rank), shard(alone, 64 << rank), shard(dist.group.WORLD, 64)


def test_bucket_bytes_that_differ_are_refused_on_every_rank_of_the_group():
    first, second = ranks.run(_buckets, 2)
    assert first == second
    refused, alone, equal = first
    assert refused[:4] == (1, "gtp", "64", "128") and alone is None and equal is None
    assert "gather_bucket_bytes is 64 on rank 0 and 128 on rank 1" in refused[4]
