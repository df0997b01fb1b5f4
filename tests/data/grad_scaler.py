#!/usr/bin/env python3
"""grad_scaler.py - writes grad_scaler.txt: training runs with torch's GradScaler, for
tests/dist/grad_scaler.c

    pip install torch; python3 tests/data/grad_scaler.py >tests/data/grad_scaler.txt

Several ranks are simulated. Each rank multiplies its gradients by the scale and rounds them to the
dtype; some then overflow on one rank. The gradients are averaged, widened to float, and unscaled.
The optimizer is SGD with a rate of 1/8. The numbers are such that the average is exact.

A run is "run", the dtype, the ranks, the parameters, the steps, the first scale, growth factor,
backoff factor and growth interval. Then, for each step: the gradients of each rank before scaling,
found_inf, the scale and growth tracker after the update, and the parameters after the step.
"""
import random

import torch

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PARAMS, STEPS, RATE = 4, 40, 0.125


def number(x):
    """A float, in digits that give the same float when they are read."""
    return "%.9g" % x


def gradient(rng, dtype, rank, step):
    """A gradient before scaling. On the last rank it is sometimes too large."""
    value = rng.randint(-512, 512) / 64
    if rank == 0 and step % 7 == 3:
        value *= 2.0**-30  # becomes 0 in F16 without a scale
    if rank and rng.random() < 0.04:
        value = rng.choice([float("inf"), float("-inf"), float("nan"), 2.0**100, -(2.0**111)])
    if rank and dtype == "F16" and rng.random() < 0.05:
        value = 48.0  # overflows while the scale is above 1024
    return value


def run(rng, dtype, ranks, scale, growth, backoff, interval):
    """Trains, and prints the run."""
    print("run", dtype, ranks, PARAMS, STEPS, number(scale), growth, backoff, interval)
    master = torch.tensor([1.0, -2.0, 0.5, 3.0], requires_grad=True)
    optimizer = torch.optim.SGD([master], lr=RATE)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=scale,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )
    for step in range(STEPS):
        raw = [[gradient(rng, dtype, r, step) for _ in range(PARAMS)] for r in range(ranks)]
        factor = scaler.scale(torch.tensor(1.0))
        scaled = [(torch.tensor(g) * factor).to(DTYPES[dtype]) for g in raw]
        total = sum(g.float() for g in scaled)
        master.grad = (total / ranks).to(DTYPES[dtype]).float()
        before = master.detach().clone()
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item()
        scaler.step(optimizer)
        scaler.update()
        assert not found or torch.equal(before, master)
        print(*(number(x) for g in raw for x in g))
        print(int(found), number(scaler.get_scale()), scaler._get_growth_tracker())
        print(*(number(x) for x in master.tolist()))


def main():
    """Prints all runs."""
    rng = random.Random(5)
    print(f"# made by grad_scaler.py with torch {torch.__version__}")
    for ranks in 1, 2, 4:
        run(rng, "F32", ranks, 65536.0, 2.0, 0.5, 3)
    run(rng, "F32", 2, 1000.0, 1.7, 0.3, 2)
    run(rng, "F32", 2, 2.0**120, 2.0, 0.5, 1)  # up to the largest scale
    run(rng, "F16", 1, 65536.0, 2.0, 0.5, 4)
    run(rng, "F16", 2, 65536.0, 2.0, 0.5, 4)
    run(rng, "F16", 2, 3000.0, 1.5, 0.7, 1)
    run(rng, "BF16", 2, 65536.0, 2.0, 0.5, 2000)


main()
