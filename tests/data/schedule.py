#!/usr/bin/env python3
"""schedule.py - writes schedule.txt: learning rates of the schedulers of torch and Ignite, for
tests/unit/schedule.c

    pip install torch pytorch-ignite; python3 tests/data/schedule.py >tests/data/schedule.txt

Numbers are hexadecimal floats. A schedule is "schedule", the kind, the fields begin, end, peak,
rise, factor, power, warmup, warmup_steps and steps of idist_schedule, and pairs of step and value.
Up to some hundred steps, the values come from the scheduler as it steps. Later values come from its
closed form, because its recursion accumulates rounding errors. A piecewise schedule is "piecewise",
the number of milestones, their steps and values, and pairs of step and value.
"""
import warnings

import ignite
import torch
from ignite.handlers import PiecewiseLinear, create_lr_scheduler_with_warmup
from torch.optim import SGD
from torch.optim import lr_scheduler as lrs

warnings.simplefilter("ignore")
CONSTANT, STEP, EXPONENTIAL, COSINE, POLYNOMIAL, ONE_CYCLE = range(6)
FAR = (1000, 12345, 99999, 100000, 250001, 999999, 1000000)


def optimizer(lr):
    return SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))], lr=lr)


def rates(make, lr, count):
    """Returns the rates in the steps 0 .. count - 1."""
    o = optimizer(lr)
    scheduler = make(o)
    values = []
    for i in range(count):
        values.append(o.param_groups[0]["lr"])
        o.step()
        if i + 1 < count:
            scheduler.step()
    return list(enumerate(values))


def closed(make, lr, steps):
    scheduler = make(optimizer(lr))
    pairs = []
    for step in steps:
        scheduler.last_epoch = step
        pairs.append((step, scheduler._get_closed_form_lr()[0]))
    return pairs


def show(kind, pairs, begin=0.0, end=0.0, peak=0.0, rise=0.0, factor=0.0, power=0.0, warmup=0.0,
         warmup_steps=0, steps=0):
    fields = (begin, end, peak, rise, factor, power, warmup)
    print("schedule", kind, *(float(x).hex() for x in fields), warmup_steps, steps, end="")
    print("", *(f"{step} {float(value).hex()}" for step, value in pairs))


print(f"# made by schedule.py with torch {torch.__version__}, ignite {ignite.__version__}")
show(CONSTANT, rates(lambda o: lrs.ConstantLR(o, 1.0), 0.3, 5), begin=0.3)
for lr, factor, every in ((0.1, 0.1, 30), (0.05, 0.9, 1), (3.0, 1.5, 7), (1.0, 0.5, 100)):
    make = lambda o: lrs.StepLR(o, every, factor)
    show(STEP, rates(make, lr, 120), begin=lr, factor=factor, steps=every)
for lr, factor in ((0.1, 0.98), (1.0, 0.5), (2.0, 1.01), (0.1, 1 - 1e-4)):
    make = lambda o: lrs.ExponentialLR(o, factor)
    show(EXPONENTIAL, rates(make, lr, 120), begin=lr, factor=factor)
for factor in (1 - 1e-4, 1 - 1e-6, 1 + 1e-5, 1 - 6e-4):
    make = lambda o: lrs.ExponentialLR(o, factor)
    show(EXPONENTIAL, closed(make, 0.1, FAR), begin=0.1, factor=factor)
for lr, end, steps in ((0.1, 0.0, 50), (0.1, 0.001, 1), (1.0, 0.25, 37), (0.0, 1.0, 10)):
    make = lambda o: lrs.CosineAnnealingLR(o, steps, end)
    far = closed(make, lr, range(3 * steps + 5)) if steps < 50 else rates(make, lr, steps)
    show(COSINE, far, begin=lr, end=end, steps=steps)
for steps in (12346, 1000000):
    make = lambda o: lrs.CosineAnnealingLR(o, steps, 1e-5)
    show(COSINE, closed(make, 0.1, FAR), begin=0.1, end=1e-5, steps=steps)
for lr, steps, power in ((0.1, 50, 1.0), (0.1, 90, 2.0), (1.0, 90, 0.5), (0.7, 60, 0.9)):
    make = lambda o: lrs.PolynomialLR(o, steps, power)
    pairs = rates(make, lr, steps) + closed(make, lr, (steps, steps + 1, 9 * steps))
    show(POLYNOMIAL, pairs, begin=lr, power=power, steps=steps)
for steps, power in ((1000001, 0.9), (100000, 3.7)):
    make = lambda o: lrs.PolynomialLR(o, steps, power)
    show(POLYNOMIAL, closed(make, 0.1, FAR), begin=0.1, power=power, steps=steps)
for lr, first, last, steps in ((0.3, 1 / 3, 1.0, 5), (1.0, 1.0, 0.1, 77)):
    make = lambda o: lrs.LinearLR(o, first, last, steps)
    show(POLYNOMIAL, rates(make, lr, 100), begin=lr * first, end=lr * last, steps=steps)
for peak, steps, rise, div, final in (
    (0.1, 100, 0.3, 25.0, 1e4), (1.0, 33, 0.25, 10.0, 1e2), (2.0, 10, 0.2, 4.0, 10.0),
    (0.5, 7, 0.9, 2.0, 3.0), (0.5, 1, 0.3, 2.0, 3.0),
):
    make = lambda o: lrs.OneCycleLR(o, peak, steps, pct_start=rise, div_factor=div,
                                    final_div_factor=final, cycle_momentum=False)
    show(ONE_CYCLE, rates(make, 1.0, steps), begin=peak / div, end=peak / div / final, peak=peak,
         rise=0.0 if rise == 0.3 else rise, steps=steps)

# A warm-up first: from torch's SequentialLR, then from Ignite, which counts both ends.
for lr, first, warm, factor in ((0.1, 0.01, 10, 0.98), (0.4, 0.5, 1, 0.5), (1.0, 1e-3, 25, 0.9)):
    make = lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, first, 1.0, warm), lrs.ExponentialLR(o, factor)], [warm])
    show(EXPONENTIAL, rates(make, lr, 60), begin=lr, factor=factor, warmup=lr * first,
         warmup_steps=warm)
for lr, first, warm, steps in ((0.1, 0.0, 5, 40), (2.0, 3.0, 2, 21), (0.1, 0.05, 11, 99)):
    o = optimizer(lr)
    both = create_lr_scheduler_with_warmup(lrs.CosineAnnealingLR(o, steps), first, warm)
    pairs = []
    for i in range(40):
        both(None)
        pairs.append((i, o.param_groups[0]["lr"]))
    show(COSINE, pairs, begin=lr, warmup=first, warmup_steps=warm - 1, steps=steps)

for milestones in (
    [(0, 0.0), (10, 1.0), (50, 0.0)], [(3, 0.5)], [(1, 0.1), (2, 0.2)],
    [(5, 1.0), (6, -1.0), (20, -1.0), (21, 0.3), (60, 1e-9)],
):
    o = optimizer(1.0)
    scheduler = PiecewiseLinear(o, "lr", milestones_values=milestones)
    pairs = []
    for i in range(80):
        scheduler(None)
        pairs.append((i, o.param_groups[0]["lr"]))
    print("piecewise", len(milestones), end="")
    for step, value in milestones + pairs:
        print("", step, float(value).hex(), end="")
    print()
