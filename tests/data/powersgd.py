#!/usr/bin/env python3
"""powersgd.py - writes powersgd.txt: gradients, as torch's PowerSGD hooks reduce them, for
tests/dist/powersgd.c

    python3 tests/data/powersgd.py >tests/data/powersgd.txt

An argument is the number of the first case to write. All later cases follow it.

"case": the number of ranks, 1 if the whole bucket is one matrix (batched_powerSGD_hook), the rank
of the matrices, error feedback, warm start, and min_compression_rate. Then for each iteration from
START on, the first one with PowerSGD: "q", the number of columns of the matrix, and the start that
torch draws, row by row, if it draws one in this iteration; "grads" and the averaged gradients,
parameter by parameter. The test computes the gradients of the ranks as `gradient` does.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks
from torch.nn.parallel import DistributedDataParallel

SHAPES = ((8, 12), (5, 6, 4), (9,), (3, 2))
SQUARE = ((169,),)  # 13 x 13 has no padding, whose errors torch would feed back as well
START, ITERATIONS = 2, 5
CASES = [(2, 0, rank, feedback, 1, 1.0 if rank == 4 else 2.0)
         for rank in (1, 2, 4) for feedback in (0, 1)]
CASES += [(3, 0, 1, 1, 1, 2.0), (3, 0, 2, 0, 0, 2.0), (3, 0, 2, 1, 0, 2.0), (3, 0, 4, 1, 1, 1.0)]
CASES += [(2, 1, 1, 1, 1, 2.0), (3, 1, 2, 1, 1, 2.0)]


def gradient(count, param, rank, iteration):
    i = torch.arange(count, dtype=torch.int64) + 7 * param
    x = (i * i * (3 + rank) + i * (17 + 5 * iteration) + 29 * rank + 11 * iteration) % 101
    return (x - 50).float() / 64


# torch's batched hook fails, because it passes two-dimensional matrices to a function that expects
# three dimensions.
orthogonalize = hooks._orthogonalize
hooks._orthogonalize = lambda matrices, epsilon=0: orthogonalize(
    matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


def work(rank, ranks, case):
    _, batched, matrix_rank, feedback, warm, rate = case
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    shapes = SQUARE if batched else SHAPES
    model = torch.nn.Module()
    for k, shape in enumerate(shapes):
        model.register_parameter(f"p{k}", torch.nn.Parameter(torch.zeros(shape)))
    params = list(model.parameters())
    model.forward = lambda grads: sum((p * g.view(p.shape)).sum() for p, g in zip(params, grads))
    ddp = DistributedDataParallel(model, bucket_cap_mb=25)
    state = hooks.PowerSGDState(None, matrix_rank, START, rate, bool(feedback), bool(warm))
    ddp.register_comm_hook(state, hooks.batched_powerSGD_hook if batched else hooks.powerSGD_hook)
    draw = torch.randn
    drawn = []

    def recorded(*args, **kwargs):
        drawn.append(draw(*args, **kwargs))
        return drawn[-1].clone()

    torch.randn = recorded
    lines = ["case " + " ".join(map(str, case))]
    for iteration in range(ITERATIONS):
        drawn.clear()
        for p in params:
            p.grad = None
        grads = [gradient(p.numel(), k, rank, iteration) for k, p in enumerate(params)]
        ddp(grads).backward()
        if iteration < START:
            continue
        for q in drawn:
            q = q.reshape(q.shape[-2], q.shape[-1])
            lines.append(f"q {q.shape[0]} " + " ".join(f"{x:.9g}" for x in q.flatten().tolist()))
        flat = torch.cat([p.grad.flatten() for p in params])
        lines.append("grads " + " ".join(f"{x:.9g}" for x in flat.tolist()))
    if rank == 0:
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"# made by powersgd.py with torch {torch.__version__}", flush=True)
    for case in CASES[int(sys.argv[1]) if len(sys.argv) > 1 else 0:]:
        mp.spawn(work, (case[0], case), nprocs=case[0])
