"""torch_alone.py - tests what the backend idist does and gloo does not, by computed results

Also tests the errors of wrong arguments, the ways to make groups, and callbacks of futures.
"""

import threading

import torch
import torch.distributed as dist

import torch_ranks


def raises(kind, pattern, call, *args, **options):
    """Checks that the call raises an exception of this kind, with the pattern in its text."""
    try:
        call(*args, **options)
    except kind as error:
        assert pattern in str(error), f'no "{pattern}" in: {error}'
        return
    raise AssertionError(f"no {kind.__name__}: {pattern}")


def dtypes(rank, size):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.full((5,), 2.0 if rank == 0 else 0.5).to(dtype)
        dist.all_reduce(x)
        assert x.dtype is dtype and (x.float() == 1.5 + 0.5 * size).all()
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        x = torch.full((5,), rank + 1, dtype=dtype)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert x.tolist() == [size] * 5
    x = torch.tensor([rank == 0, False, True])
    dist.all_reduce(x, dist.ReduceOp.SUM)
    assert x.view(torch.uint8).tolist() == [1, 0, 1]
    x = torch.tensor([rank == 0, False, True])
    dist.all_reduce(x, dist.ReduceOp.PRODUCT)
    assert x.tolist() == [size == 1, False, True]
    x = torch.full((3,), 2.0 if rank == 0 else 0.5).to(torch.float8_e8m0fnu)
    dist.broadcast(x, 0)
    assert x.float().tolist() == [2.0] * 3
    parts = [torch.zeros(4, dtype=torch.complex64) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((4,), 1 + 2j * rank).conj(), parts)
    assert rank or [part[3].item() for part in parts] == [1 - 2j * r for r in range(size)]


def premul(rank, size):
    op = dist._make_nccl_premul_sum(0.5)
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x, op)
    assert x.tolist() == [size * (size + 1) / 4] * 3
    x, out = torch.arange(2.0 * size), torch.zeros(2)
    dist.reduce_scatter_tensor(out, x, dist._make_nccl_premul_sum(torch.tensor([2.0])))
    assert out.tolist() == [4.0 * size * rank, 2.0 * size * (2 * rank + 1)]


def uneven(rank, size):
    parts = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    assert [part.tolist() for part in parts] == [[float(r)] * (r + 1) for r in range(size)]
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, [torch.full((r + 1,), float(r)) for r in range(size)])
    assert out.tolist() == [float(rank * size)] * (rank + 1)


def gradients(rank, _size):
    """A collective changes a parameter as if from outside of torch."""
    x = torch.ones(4, 3, requires_grad=True)
    version = x._version
    dist.broadcast(x, 0)
    dist.all_reduce(x.t(), dist.ReduceOp.MAX)
    assert x._version == version and x.grad_fn is None
    with torch.inference_mode():
        y = torch.ones(3, 4)
    dist.all_reduce(y.t(), dist.ReduceOp.MAX)
    assert rank >= 0


def any_source(rank, size):
    if rank > 0:
        dist.send(torch.tensor([rank]), 0, tag=3)
        return
    seen = set()
    for _ in range(1, size):
        x = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(x, tag=3)
        assert source == x.item()
        seen.add(source)
    assert seen == set(range(1, size))


def futures(rank, size):
    """Callbacks run in the order of the calls, and may themselves call collectives."""
    first = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    x = torch.ones(3)
    second = dist.all_reduce(x, async_op=True)

    def again(future):
        y = future.value()[0].clone()
        dist.all_reduce(y)  # blocks in the worker
        return y

    chained = second.get_future().then(again)
    assert first.wait()[0].tolist() == [size] * 2
    assert chained.wait().tolist() == [size * size] * 3
    works = [dist.all_reduce(torch.full((5,), float(i)), async_op=True) for i in range(50)]
    for i in reversed(range(50)):
        works[i].wait()
        assert works[i].result()[0][0].item() == i * size and works[i].is_completed()
    assert rank >= 0


def threads(rank, size):
    """A thread waits for a message while another one makes collectives."""
    if size == 1:
        return  # torch has no messages to oneself
    x = torch.zeros(1)
    receiver = threading.Thread(target=lambda: dist.recv(x, (rank - 1) % size, tag=9))
    receiver.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(100))
    y = torch.zeros(1)
    received = dist.irecv(y, (rank - 1) % size, tag=8)
    dist.send(torch.ones(1), (rank + 1) % size, tag=8)
    received.wait()
    dist.send(torch.tensor([float(rank)]), (rank + 1) % size, tag=9)
    receiver.join()
    assert x.item() == (rank - 1) % size


def arguments(rank, size):
    cpu = torch.ones(3)
    raises(ValueError, "dense tensors", dist.all_reduce, torch.eye(3).to_sparse())
    raises(ValueError, "BAND", dist.all_reduce, cpu, dist.ReduceOp.BAND)
    raises(ValueError, "bool", dist.all_reduce, torch.tensor([True]), dist.ReduceOp.AVG)
    raises(ValueError, "got 5", dist.all_gather_into_tensor, torch.ones(5), cpu)
    raises(ValueError, "Float8_e8m0fnu", dist.all_reduce, cpu.to(torch.float8_e8m0fnu))
    dist.all_reduce(cpu)  # the group is still in order
    assert cpu[0].item() == size and rank >= 0


def objects(rank, size):
    out = [None] * size
    dist.all_gather_object(out, {"rank": rank, "text": "x" * rank})
    assert [o["rank"] for o in out] == list(range(size))
    box = [("a", 1)] if rank == 0 else [None]
    dist.broadcast_object_list(box)
    assert box == [("a", 1)]
    dist.monitored_barrier()


def groups(rank, size):
    """Groups of two ranks in reverse order, a split, and groups beside each other."""
    pair = dist.new_group([size - 1, 0], sort_ranks=False) if size > 1 else None
    if pair and rank in (0, size - 1):
        x = torch.tensor([rank])
        dist.broadcast(x, group_src=0, group=pair)
        assert x.item() == size - 1
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    half = dist.split_group(split_ranks=[h for h in halves if h])
    mine = halves[0] if rank in halves[0] else halves[1]
    x = torch.ones(1)
    dist.all_reduce(x, group=half)
    assert x.item() == len(mine)
    others = [dist.new_group(list(range(size))) for _ in range(3)]
    works = [
        dist.all_reduce(torch.full((1,), float(i)), group=other, async_op=True)
        for i, other in enumerate(others)
    ]
    for i in (2, 0, 1):
        works[i].wait()
        assert works[i].result()[0].item() == i * size
    dist.destroy_process_group(others[1])
    dist.barrier(group=others[2])


def alone(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size)
    parts = [dtypes, premul, uneven, gradients, any_source, futures, threads, arguments, objects]
    for part in [*parts, groups]:
        part(rank, size)
        dist.barrier()
        if rank == 0:
            print("ok", part.__name__, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    for count in (2, 3, 1):
        torch_ranks.check_all(count, alone)
