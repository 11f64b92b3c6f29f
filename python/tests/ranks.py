"""Runs a function on several ranks: processes that meet over gloo through a file, without a port."""

import multiprocessing
import os
import tempfile
import traceback


def _one(function, rank, size, path, answers, arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
        answer = function(rank, *arguments)
        dist.barrier()
        answers.put((rank, answer, None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))


def run(function, size, *arguments, timeout=90):
    """What `function(rank, *arguments)` returned on each rank. An exception on one fails the test."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        path = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_one, args=(function, rank, size, path, answers, arguments))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            got = [answers.get(timeout=timeout) for _ in ranks]
        finally:
            for process in ranks:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
    failed = [f"rank {rank}: {text}" for rank, _, text in got if text]
    assert not failed, "\n".join(failed)
    return [answer for _, answer, _ in sorted(got, key=lambda one: one[0])]
