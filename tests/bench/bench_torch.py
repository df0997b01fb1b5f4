#!/usr/bin/env python3
"""bench_torch.py - times the backend idist of examples/apps/torch beside gloo, on 2 ranks

Run it with a Python that has torch; see tests/train/torch.sh. Each size is timed in turn over idist
and over gloo. Prints the median and the fastest round on rank 0, as a table.
"""

import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "train"))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_ranks

SIZES = [4, 256, 4096, 65536, 1 << 20, 8 << 20, 64 << 20]
ROUNDS = 11


def seconds(call, group, repetitions):
    """Returns the time of a call, averaged over calls that follow each other."""
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - start) / repetitions


def summary(times):
    times = sorted(times)
    return f"{times[len(times) // 2] * 1e6:.0f} ({times[0] * 1e6:.0f})"


def compare(rank, what, calls, groups, repetitions):
    """Times the calls of both backends in turn."""
    times = {name: [] for name in groups}
    for _ in range(ROUNDS):
        for name, group in groups.items():
            calls[name]()  # not timed
            times[name].append(seconds(calls[name], group, repetitions))
    if rank == 0:
        print(f"| {what} | {summary(times['idist'])} | {summary(times['gloo'])} |", flush=True)


def all_reduces(rank, groups, async_op):
    for nbytes in SIZES:
        x = torch.zeros(max(nbytes // 4, 1))
        calls = {
            name: lambda group=group: (
                dist.all_reduce(x, group=group, async_op=True).wait()
                if async_op
                else dist.all_reduce(x, group=group)
            )
            for name, group in groups.items()
        }
        what = "asynchronous all_reduce" if async_op else "all_reduce"
        compare(rank, f"{what}, {nbytes} B", calls, groups, 3 if nbytes > 1 << 20 else 50)


def ddp_steps(rank, groups):
    for megabytes in (25, 100):
        width = int((megabytes * 1e6 / 4 / 4) ** 0.5)
        calls = {}
        x = torch.randn(4, width)
        for name, group in groups.items():
            layers = [torch.nn.Linear(width, width, bias=False) for _ in range(4)]
            model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
            calls[name] = lambda model=model: model(x).sum().backward()
        compare(rank, f"DDP step, {megabytes} MB of gradients", calls, groups, 2)


def bench(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size)
    groups = {"idist": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if rank == 0:
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, torch {torch.__version__}")
        print("| us: median (fastest) | idist | gloo |\n|---|---|---|", flush=True)
    all_reduces(rank, groups, False)
    all_reduces(rank, groups, True)
    ddp_steps(rank, groups)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch_ranks.check_all(2, bench, 400)
