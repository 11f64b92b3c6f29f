"""A program of two ranks: after a step that is well, the second one reduces no more. The first waits in vain, and its optimizer
refuses. `test_torch_cuda.py` starts it; the argument says whether reductions are made eagerly or by a graph that runs on."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import sessile
from sessile.torch import GraphStorage, shard_

PATIENCE = 3.0


def reductions(sharded, storage, rank, graphs):
    """A function that reduces a gradient of each weight, as a backward does."""

    def reduce(complete):
        sends = [sharded.wgrad_input(weight) for weight in sharded.weights]
        for weight, send in zip(sharded.weights, sends):
            send.fill_(rank + 1.0)
            sharded.reduce(weight, send)
        if complete:
            storage.complete()
        sharded.drain()

    sharded.manual = True
    # Buffers of eager work are made by all ranks together, outside any capture.
    reduce(False)
    sharded.zero_grad()
    torch.cuda.synchronize()
    if not graphs:
        return lambda: reduce(False)

    def capture(scope):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), scope("reductions"):
            reduce(True)
        return graph

    capture(storage.discover)
    storage.seal()
    return storage.launcher("reductions", capture(storage.capture))


def refused(call):
    """Asserts that the call raises what says which rank did not come."""
    try:
        call()
    except sessile.DeviceError as error:
        assert (error.group, error.rank, error.missing) == ("gtp", 0, 1), vars(error)
        assert error.round >= 1 and error.remedy, vars(error)
        return
    raise AssertionError(f"{call} was not refused")


def main():
    rank, graphs = int(os.environ["LOCAL_RANK"]), sys.argv[1] == "graphs"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    # Ranks may share a GPU, which NCCL does not take.
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).to("cuda", torch.bfloat16)
    storage = GraphStorage(patience=PATIENCE)
    sharded = shard_(net, dist.group.WORLD, storage=storage, kind="one_shot")
    masters = [weight.parameter.detach().float().clone() for weight in sharded.weights]
    for master, weight in zip(masters, sharded.weights):
        master.grad = weight.main_grad
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    sharded.guard(optimizer)
    reduce = reductions(sharded, storage, rank, graphs)

    before = [master.clone() for master in masters]
    reduce()
    optimizer.step()
    assert all(bool((weight.main_grad == 1.5).all()) for weight in sharded.weights)
    assert not any(torch.equal(one, other) for one, other in zip(masters, before))
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        before = [master.clone() for master in masters]
        # No join, and no wait: the guard does both.
        reduce()
        for call in (optimizer.step, optimizer.step, sharded.join, sharded.check, reduce):
            refused(call)
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(masters, before))
    dist.barrier()
    print(f"rank {rank} as expected", flush=True)


if __name__ == "__main__":
    main()
