"""torch_faults.py - a lost rank, a late rank, an abort, and process groups one after the other

The exception on the other ranks must name the rank, and come in time. Process groups that are gone
must leave no threads and no descriptors.
"""

import datetime
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import torch_ranks


def fails(pattern, within_s, call):
    """Checks that the call raises DistBackendError with this text, and in time."""
    start = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        took = time.monotonic() - start
        assert pattern in str(error), f'no "{pattern}" in: {error}'
        assert took < within_s, f"took {took} s: {error}"
        return
    raise AssertionError("no exception")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size)
    dist.barrier()
    if rank == 1:
        die()
    fails("rank 1", 1, lambda: dist.all_reduce(torch.ones(10)))
    dist.destroy_process_group()


def killed_async(rank, size, folder):
    """The exception comes from wait(), and from the future."""
    torch_ranks.init(folder / "store", rank, size)
    dist.barrier()
    work = dist.all_reduce(torch.ones(10), async_op=True) if rank != 1 else None
    if rank == 1:
        die()
    fails("rank 1", 1, work.wait)
    assert work.exception() is not None and work.is_completed()
    try:
        work.get_future().wait()
        raise AssertionError("the future has a value")
    except RuntimeError as error:
        assert "rank 1" in str(error), error
    dist.destroy_process_group()


def killed_receive(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size)
    dist.barrier()
    if rank == 1:
        die()
    fails("rank 1", 1, lambda: dist.recv(torch.ones(10), 1))
    dist.destroy_process_group()


def killed_in_group(rank, size, folder):
    """The text names the rank of the default group, not the rank within the subgroup."""
    torch_ranks.init(folder / "store", rank, size)
    group = dist.new_group([1, 2])
    dist.barrier()
    if rank == 2:
        die()
    if rank == 1:
        fails("rank 2", 1, lambda: dist.all_reduce(torch.ones(10), group=group))
    dist.destroy_process_group()


def late(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size, timeout=datetime.timedelta(seconds=1))
    dist.barrier()
    if rank == 1:
        time.sleep(2)
    fails("rank 1", 3, lambda: dist.all_reduce(torch.ones(10)))
    dist.destroy_process_group()


def late_call(rank, size, folder):
    """The time-out of one call, which is shorter than that of the group."""
    torch_ranks.init(folder / "store", rank, size)
    dist.barrier()
    if rank == 1:
        time.sleep(2)
    timeout = datetime.timedelta(seconds=1)
    fails("rank 1", 3, lambda: dist.monitored_barrier(timeout=timeout))
    dist.destroy_process_group()


def late_wait(rank, size, folder):
    """A wait that times out does not end the call."""
    torch_ranks.init(folder / "store", rank, size)
    x, y = torch.ones(2), torch.ones(2)
    dist.barrier()
    if rank == 1:
        time.sleep(1)
    for work in (dist.all_reduce(x, async_op=True), dist.irecv(y, 1) if rank == 0 else None):
        try:
            if rank == 0:
                work.wait(datetime.timedelta(milliseconds=100))
                raise AssertionError("no exception")
        except RuntimeError as error:
            assert "time" in str(error).lower(), error
    time.sleep(1.5)
    if rank == 1:
        dist.send(y * 5, 0)
    dist.barrier()
    assert x.tolist() == [size] * 2
    assert rank != 0 or y.tolist() == [5, 5]
    dist.destroy_process_group()


def mismatch(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size)
    fails("count", 3, lambda: dist.all_reduce(torch.ones(10 + rank)))
    dist.destroy_process_group()


def aborted(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        dist.group.WORLD.abort()
    else:
        fails("abort", 3, lambda: dist.all_reduce(torch.ones(10)))
    dist.destroy_process_group()


def absent(rank, size, folder):
    """Rank 0 names the ranks that have not come."""
    if rank == 2:
        return
    try:
        torch_ranks.init(folder / "store", rank, size, timeout=datetime.timedelta(seconds=1))
    except dist.DistError as error:
        assert rank != 0 or "init_process_group: 2, after" in str(error), error
        return
    raise AssertionError("no exception")


def not_destroyed(rank, size, folder):
    """A process group ends while calls are under way, without destroy_process_group."""
    store = dist.FileStore(str(folder / "store"), size)
    backend = torch_ranks.idist_torch.open_world(store, rank, size, torch_ranks.TIMEOUT)
    if rank == 1:  # does not make the calls, and lives until rank 0 has left the group
        wait_for(folder / "left")
        return
    for _ in range(3):
        backend.allreduce([torch.ones(10)], dist.AllreduceOptions())
    backend.recv([torch.ones(1)], 1, 0)
    wait_for_threads(lambda n: n > 1)
    del backend
    wait_for_threads(lambda n: n == 1)
    (folder / "left").touch()


def wait_for(path):
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.01)


def wait_for_threads(enough):
    """Waits until this process has so many threads."""
    deadline = time.monotonic() + 10
    while not enough(len(os.listdir("/proc/self/task"))):
        assert time.monotonic() < deadline, os.listdir("/proc/self/task")
        time.sleep(0.01)


def usage():
    """Returns the numbers of threads and of descriptors, and the files of shared memory."""
    return (
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        sorted(name for name in os.listdir("/dev/shm") if "idist" in name),
    )


def again(rank, size, folder):
    """20 process groups at one store, each with a subgroup and calls of all kinds."""
    store = dist.FileStore(str(folder / "store"), size)
    before = None
    for turn in range(21):
        dist.init_process_group(
            "idist", store=store, rank=rank, world_size=size, timeout=torch_ranks.TIMEOUT
        )
        group = dist.new_group(list(range(size)))
        x = torch.ones(2)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.isend(x, (rank + 1) % size)
        dist.recv(x, (rank - 1) % size)
        assert x.tolist() == [size * size] * 2
        dist.destroy_process_group()
        del group
        if turn == 0:
            before = usage()
    after = usage()
    assert after == before, f"{before} became {after}"
    assert os.listdir(folder) == ["store"], os.listdir(folder)
    assert threading.active_count() == 1


CASES = {
    "killed": (killed, 3, [0, -9, 0]),
    "killed_async": (killed_async, 3, [0, -9, 0]),
    "killed_receive": (killed_receive, 2, [0, -9]),
    "killed_in_group": (killed_in_group, 3, [0, 0, -9]),
    "late": (late, 3, [0, 0, 0]),
    "late_call": (late_call, 3, [0, 0, 0]),
    "late_wait": (late_wait, 2, [0, 0]),
    "mismatch": (mismatch, 2, [0, 0]),
    "aborted": (aborted, 2, [0, 0]),
    "absent": (absent, 3, [0, 0, 0]),
    "not_destroyed": (not_destroyed, 2, [0, 0]),
    "again": (again, 3, [0, 0, 0]),
}

if __name__ == "__main__":
    failed = False
    for name in sys.argv[1:] or CASES:
        body, size, expected = CASES[name]
        statuses = torch_ranks.run(size, body, 60)
        passed = statuses == expected
        failed = failed or not passed
        print("ok" if passed else "not ok", name, statuses, flush=True)
    sys.exit(failed)
