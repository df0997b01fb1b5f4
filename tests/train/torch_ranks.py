"""torch_ranks.py - starts ranks of torch.distributed for the other files torch_*.py

The ranks are forked from a process that has imported torch, which is faster than starting each
anew. They meet at a file.
"""

import datetime
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/apps/torch"))

import torch
import torch.distributed as dist

import idist_torch

TIMEOUT = datetime.timedelta(seconds=60)


def init(path, rank, size, backend="idist", timeout=TIMEOUT):
    """Makes the default process group, whose ranks meet at a file."""
    store = dist.FileStore(str(path), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _rank(body, rank, size, folder):
    """Runs body in a new process, as one rank. Never returns."""
    status = 1
    try:
        torch.set_num_threads(1)
        body(rank, size, pathlib.Path(folder))
        status = 0
    except BaseException:
        print(f"rank {rank}:", traceback.format_exc(), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(size, body, seconds=120):
    """Runs body(rank, size, folder) in `size` processes. Returns their exit statuses.

    A process that a signal ends has the negative number of the signal. When the time is up, the
    processes that are left are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(size):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _rank(body, rank, size, folder)
            pids.append(pid)
        return _statuses(pids, time.monotonic() + seconds)


def _statuses(pids, deadline):
    statuses = [None] * len(pids)
    while None in statuses:
        for i, pid in enumerate(pids):
            if statuses[i] is not None:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[i] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            left = [rank for rank, status in enumerate(statuses) if status is None]
            print("hang: ranks", left, file=sys.stderr)
            for rank in left:
                os.kill(pids[rank], signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
    return statuses


def check_all(size, body, seconds=120):
    """Runs body in all ranks, and exits if one of them fails."""
    statuses = run(size, body, seconds)
    if statuses != [0] * size:
        sys.exit(f"{body.__name__} on {size} ranks: exit statuses {statuses}")
