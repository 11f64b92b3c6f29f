# Reduce-scatter of a BF16 gradient and its addition to FP32, as frameworks run it: graphs of 20 calls in rotating buffers.
# Arguments: sizes, rounds, a suffix for names, ranks, ranks of a group. Writes rows as JSON. One process for each GPU,
# started by the first; groups of consecutive ranks, all at once.
import json
import os
import socket
import subprocess
import sys
import time

CALLS = 20
ROTATED = 1 << 30


def main():
    sizes = [int(x) for x in sys.argv[1].split(",")]
    rounds, suffix, size = int(sys.argv[2]), sys.argv[3], int(sys.argv[5])
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    group = dist.group.WORLD
    if size < world:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        group = groups[rank // size]
    backend = group._get_backend(device)
    dist.all_reduce(torch.ones(1, device=device))
    dist.all_reduce(torch.ones(1, device=device), group=group)
    room = max(ROTATED, max(sizes))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool, symm=True)
    with torch.cuda.use_mem_pool(pool):
        registered_in = torch.ones(room // 2, device=device, dtype=torch.bfloat16)
        registered_out = torch.empty(room // 2 // size, device=device, dtype=torch.bfloat16)
    plain_in, plain_out = registered_in.clone(), registered_out.clone()
    sums = torch.zeros(room // 2 // size, device=device)

    def slower(x):
        t = torch.tensor([x], device=device, dtype=torch.float64)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.item()

    def measure(name, nbytes, call):
        n = nbytes // 2
        turns = max(1, min(CALLS, ROTATED // nbytes))

        def calls():
            for i in range(CALLS):
                t = i % turns
                call(t * n, n, t * n // size, n // size)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()

        def once(launches):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(launches):
                graph.replay()
            torch.cuda.synchronize()
            return slower((time.perf_counter() - begin) * 1e6)

        once(1)
        launches = int(max(1, min(40, 3000 // max(once(1), 1))))
        times = sorted(once(launches) / launches / CALLS for _ in range(rounds))
        return dict(variant=name, bytes=nbytes, median_us=times[len(times) // 2], least_us=times[0], most_us=times[-1],
                    kernel=None, blocks=None)

    def scatter(send, recv, mul, add):
        def call(at, n, to, m):
            x, y = send[at:at + n], recv[to:to + m]
            if mul:
                x.mul_(1.0 / size)
            dist.reduce_scatter_tensor(y, x, group=group)
            if add:
                sums[to:to + m].add_(y)
        return call

    kinds = [
        ("torch symmetric" + suffix + " + add_", registered_in, registered_out, False, True),
        ("torch mul_ + symmetric" + suffix + " + add_", registered_in, registered_out, True, True),
    ]
    if not suffix:
        kinds += [
            ("torch ring + add_", plain_in, plain_out, False, True),
            ("torch mul_ + ring + add_", plain_in, plain_out, True, True),
        ]
    rows = [measure(name, nbytes, scatter(send, recv, mul, add))
            for name, send, recv, mul, add in kinds for nbytes in sizes]
    if rank == 0:
        print(json.dumps(rows), file=sys.stdout, flush=True)
    dist.barrier()
    torch.cuda.synchronize()
    backend.deregister_mem_pool(pool)
    dist.destroy_process_group()


def start():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    source = sys.orig_argv[sys.orig_argv.index("-c") + 1]
    ranks, world = [], int(sys.argv[4])
    for rank in range(world):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                   SESSILE_TORCH_RANK="1")
        ranks.append(subprocess.Popen([sys.executable, "-c", source, *sys.argv[1:]], env=env,
                                      stdout=None if rank == 0 else subprocess.DEVNULL))
    sys.exit(max(abs(r.wait()) for r in ranks))


if os.environ.get("SESSILE_TORCH_RANK"):
    main()
else:
    import torch  # noqa: F401  Its absence is told before ranks start.

    start()
