"""torch_collectives.py - compares every collective of the backend idist with gloo

Both backends get the same random tensors, of all dtypes, ops and several shapes, in calls that
block and in calls that do not. Where gloo rejects a call, idist may accept it. Where gloo takes
contiguous tensors only, idist must give the same result for other tensors.
"""

import itertools
import sys
import warnings

import torch
import torch.distributed as dist

import torch_ranks

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = FLOATS + INTEGERS + COMPLEX + [torch.bool]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
SHAPES = [(), (7,), (3, 5), (0,), (2, 0, 3), (1000,)]
TOLERANCES = {
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
}


class Tensors:
    """Makes the same tensors for both backends."""

    def __init__(self, rank, shape, dtype, contiguous=True):
        self.rank, self.shape, self.dtype, self.contiguous = rank, shape, dtype, contiguous
        self.generator = torch.Generator().manual_seed(rank)

    def random(self, *shape):
        shape = shape or self.shape
        values = torch.randint(0, 4, shape, generator=self.generator)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            values = values + torch.rand(shape, generator=self.generator)
        return self.layout(values.to(self.dtype))

    def zeros(self, *shape):
        return self.layout(torch.zeros(shape or self.shape, dtype=self.dtype))

    def layout(self, tensor):
        if self.contiguous or tensor.dim() == 0:
            return tensor
        # Every second element of a larger tensor, with the dimensions in memory in reverse order.
        dims = list(reversed(range(tensor.dim())))
        room = torch.zeros([2 * n for n in reversed(tensor.shape)], dtype=self.dtype)
        view = room.permute(dims)[tuple(slice(None, None, 2) for _ in dims)]
        view.copy_(tensor)
        return view


class Calls:
    """The collectives. Each method returns the tensors that hold its result."""

    def __init__(self, group, tensors, async_op):
        self.group, self.tensors, self.async_op = group, tensors, async_op
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def end(self, work):
        if self.async_op:
            work.wait()

    def options(self):
        return {"group": self.group, "async_op": self.async_op}

    def all_reduce(self, op):
        x = self.tensors.random()
        self.end(dist.all_reduce(x, op, **self.options()))
        return [x]

    def all_reduce_coalesced(self, op):
        x = [self.tensors.random(), self.tensors.random(3), self.tensors.random()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.end(dist.all_reduce_coalesced(x, op, **self.options()))
        return x

    def reduce(self, op):
        x, root = self.tensors.random(), self.size - 1
        self.end(dist.reduce(x, group_dst=root, op=op, **self.options()))
        return [x] if self.rank == root else []

    def reduce_scatter(self, op):
        x = self.tensors.zeros()
        parts = [self.tensors.random() for _ in range(self.size)]
        self.end(dist.reduce_scatter(x, parts, op, **self.options()))
        return [x]

    def reduce_scatter_tensor(self, op):
        x = self.tensors.zeros(2, 3)
        self.end(
            dist.reduce_scatter_tensor(
                x, self.tensors.random(2 * self.size, 3), op, **self.options()
            )
        )
        return [x]

    def broadcast(self):
        x = self.tensors.random()
        self.end(dist.broadcast(x, group_src=self.size - 1, **self.options()))
        return [x]

    def all_gather(self):
        x = [self.tensors.zeros() for _ in range(self.size)]
        self.end(dist.all_gather(x, self.tensors.random(), **self.options()))
        return x

    def all_gather_into_tensor(self):
        x = self.tensors.zeros(2 * self.size, 3)
        self.end(dist.all_gather_into_tensor(x, self.tensors.random(2, 3), **self.options()))
        return [x]

    def all_gather_coalesced(self):
        x = [[self.tensors.zeros(), self.tensors.zeros(2)] for _ in range(self.size)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.end(
                dist.all_gather_coalesced(
                    x, [self.tensors.random(), self.tensors.random(2)], **self.options()
                )
            )
        return sum(x, [])

    def gather(self):
        root = self.size - 1
        x = [self.tensors.zeros() for _ in range(self.size)] if self.rank == root else None
        self.end(dist.gather(self.tensors.random(), x, group_dst=root, **self.options()))
        return x or []

    def scatter(self):
        x, root = self.tensors.zeros(), self.size - 1
        parts = [self.tensors.random() for _ in range(self.size)]
        self.end(
            dist.scatter(x, parts if self.rank == root else None, group_src=root, **self.options())
        )
        return [x]

    def all_to_all(self):
        x = [self.tensors.zeros() for _ in range(self.size)]
        parts = [self.tensors.random() for _ in range(self.size)]
        self.end(dist.all_to_all(x, parts, **self.options()))
        return x

    def all_to_all_single(self):
        x = self.tensors.zeros(2 * self.size, 3)
        self.end(
            dist.all_to_all_single(x, self.tensors.random(2 * self.size, 3), **self.options())
        )
        return [x]

    def all_to_all_splits(self):
        """Rank a sends a + b + 1 rows to rank b."""
        counts = [self.rank + other + 1 for other in range(self.size)]
        x = self.tensors.zeros(sum(counts), 3)
        sent = self.tensors.random(sum(counts), 3)
        self.end(dist.all_to_all_single(x, sent, counts, counts, **self.options()))
        return [x]

    def coalescing_manager(self):
        x = [self.tensors.zeros(self.size * 2), self.tensors.zeros(self.size * 3)]
        parts = [self.tensors.random(2), self.tensors.random(3)]
        with dist._coalescing_manager(self.group, async_ops=self.async_op) as manager:
            for out, part in zip(x, parts):
                dist.all_gather_into_tensor(out, part, group=self.group)
        if self.async_op:
            manager.wait()
        return x

    def barrier(self):
        self.end(dist.barrier(**self.options()))
        return []

    def ring(self):
        """Sends to the next rank and receives from the previous one, in both forms."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        x, y = self.tensors.zeros(), self.tensors.zeros()
        sent = self.tensors.random()
        works = [
            dist.isend(sent, group_dst=after, group=self.group, tag=5),
            dist.irecv(x, group_src=before, group=self.group, tag=5),
        ]
        for work in works:
            work.wait()
        if self.rank % 2 == 0:
            dist.send(sent, group_dst=after, group=self.group)
            dist.recv(y, group_src=before, group=self.group)
        else:
            dist.recv(y, group_src=before, group=self.group)
            dist.send(sent, group_dst=after, group=self.group)
        return [x, y]

    def batch(self):
        """A large message in both directions at the same time."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        x, sent = self.tensors.zeros(300000), self.tensors.random(300000)
        pairs = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=before),
        ]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        return [x]


REDUCTIONS = [
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
]
MOVES = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_splits",
    "coalescing_manager",
    "barrier",
    "ring",
]


class Comparison:
    """Makes each call on both groups and counts what was compared."""

    def __init__(self, idist_group, gloo_group):
        self.groups = (idist_group, gloo_group)
        self.rank = dist.get_rank(idist_group)
        self.compared, self.only_idist = 0, set()

    def outcome(self, group, name, tensors, async_op, op):
        try:
            args = [] if op is None else [getattr(dist.ReduceOp, op)]
            return getattr(Calls(group, tensors, async_op), name)(*args)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return error

    def check(self, name, shape, dtype, async_op=False, op=None, contiguous=True):
        what = f"{name} {op} {shape} {dtype} async={async_op} contiguous={contiguous}"
        group, gloo = self.groups
        expected = self.outcome(gloo, name, Tensors(self.rank, shape, dtype), async_op, op)
        got = self.outcome(group, name, Tensors(self.rank, shape, dtype, contiguous), async_op, op)
        if isinstance(expected, Exception):
            if not isinstance(got, Exception):
                self.only_idist.add(f"{name} {op} {dtype}")
            return
        assert not isinstance(got, Exception), f"{what}: {got}"
        assert len(got) == len(expected), what
        tolerance = TOLERANCES.get(dtype, 1e-9)
        for a, b in zip(got, expected):
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
            )
        self.compared += 1


def compare_all(comparison):
    for name, dtype, op in itertools.product(REDUCTIONS, DTYPES, OPS):
        if dtype is torch.bool and op not in ("BAND", "BOR", "BXOR", "MIN", "MAX"):
            continue
        comparison.check(name, (7,), dtype, False, op)
    for name, shape, async_op in itertools.product(REDUCTIONS, SHAPES, [False, True]):
        comparison.check(name, shape, torch.float32, async_op, "SUM")
        comparison.check(name, shape, torch.float32, async_op, "MAX", contiguous=False)
    for name, dtype in itertools.product(MOVES, DTYPES):
        comparison.check(name, (7,), dtype, False)
    for name, shape, async_op in itertools.product(MOVES, SHAPES, [False, True]):
        comparison.check(name, shape, torch.float32, async_op)
        # gloo's sends take contiguous tensors only, as do its all_to_all_single and barrier.
        comparison.check(name, shape, torch.float32, async_op, contiguous=False)
    for dtype in FLOATS:
        comparison.check("batch", (), dtype)


def collectives(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size)
    gloo = dist.new_group(backend="gloo")
    whole = Comparison(dist.group.WORLD, gloo)
    compare_all(whole)
    ranks = [0, size - 1]
    part, gloo_part = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
    if rank in ranks:
        compare_all(Comparison(part, gloo_part))
    dist.barrier()
    if rank == 0:
        more = len(whole.only_idist)
        print(f"{size} ranks: {whole.compared} calls equal; {more} more that gloo does not take")
    dist.destroy_process_group()


if __name__ == "__main__":
    for count in sys.argv[1:]:
        torch_ranks.check_all(int(count), collectives, 300)
