#!/usr/bin/env python3
"""schedule.py - writes schedule.txt: learning rates of the schedulers of torch and Ignite, for
tests/unit/schedule.c

    pip install torch pytorch-ignite; python3 tests/data/schedule.py >tests/data/schedule.txt

Numbers are hexadecimal floats. A schedule is "schedule", the kind, the fields begin, end, peak,
rise, factor, power, warmup, warmup_steps, steps, down_steps, multiple, linear, three_phase,
milestone_count and milestones of idist_schedule, and pairs of step and value. Up to some hundred
steps, the values come from the scheduler as it steps. Later values come from its closed form,
because its recursion accumulates rounding errors.

A sequence is "sequence", the number of schedules, the milestones, the schedules without pairs, and
pairs of step and value. A piecewise schedule is "piecewise", the number of milestones, their steps
and values, and pairs of step and value.

A plateau is "plateau", the fields value, factor, min_value, eps, threshold, patience, cooldown,
absolute and high_is_best of idist_plateau, and for each update the metric and then the fields
value, best, bad_count and cooldown_left.
"""
import random
import re
import warnings

import ignite
import torch
from ignite.handlers import PiecewiseLinear, create_lr_scheduler_with_warmup
from torch.optim import SGD
from torch.optim import lr_scheduler as lrs

warnings.simplefilter("ignore")
(CONSTANT, STEP, EXPONENTIAL, COSINE, POLYNOMIAL, ONE_CYCLE, MULTI_STEP, RESTARTS, CYCLIC,
 CYCLIC_HALVED, CYCLIC_EXPONENTIAL) = range(11)
FAR = (1000, 12345, 99999, 100000, 250001, 999999, 1000000)


def number(x):
    """Prints a float in hexadecimal, without the zeros at the end."""
    return re.sub(r"\.?0+p", "p", float(x).hex())


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


def schedule(kind, begin=0.0, end=0.0, peak=0.0, rise=0.0, factor=0.0, power=0.0, warmup=0.0,
             warmup_steps=0, steps=0, down_steps=0, multiple=0, linear=0, three_phase=0,
             milestones=()):
    fields = [number(x) for x in (begin, end, peak, rise, factor, power, warmup)]
    fields += [warmup_steps, steps, down_steps, multiple, linear, three_phase, len(milestones)]
    return " ".join(str(x) for x in ("schedule", kind, *fields, *milestones))


def show_pairs(text, pairs):
    print(text, *(f"{step} {number(value)}" for step, value in pairs))


def show(kind, pairs, **fields):
    show_pairs(schedule(kind, **fields), pairs)


def show_sequence(lr, make, milestones, schedules):
    pairs = rates(lambda o: lrs.SequentialLR(o, [f(o) for f in make], milestones), lr, 110)
    show_pairs(" ".join(str(x) for x in ("sequence", len(make), *milestones, *schedules)), pairs)


def show_plateau(metrics, lr, **options):
    """Prints the metrics, and the rate and the counts that torch has after each of them."""
    o = optimizer(lr)
    scheduler = lrs.ReduceLROnPlateau(o, **options)
    floats = [lr, scheduler.factor, scheduler.min_lrs[0], scheduler.eps, scheduler.threshold]
    # In idist_plateau, negative numbers mean 0.
    floats = [x if x or i < 3 else -1.0 for i, x in enumerate(floats)]
    modes = int(scheduler.threshold_mode == "abs"), int(scheduler.mode == "max")
    print("plateau", *(number(x) for x in floats), scheduler.patience or -1,
          scheduler.cooldown, *modes, end="")
    for metric in metrics:
        scheduler.step(metric)
        print("", number(metric), number(o.param_groups[0]["lr"]),
              number(scheduler.best), scheduler.num_bad_epochs, scheduler.cooldown_counter,
              end="")
    print()


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
        print("", step, number(value), end="")
    print()

# The same kinds with factors of the rate instead of values.
for lr, first, steps in ((0.3, 1 / 3, 5), (0.1, 0.5, 1), (2.0, 1e-3, 40), (0.7, 1.0, 10)):
    make = lambda o: lrs.ConstantLR(o, first, steps)
    show(MULTI_STEP, rates(make, lr, 110), begin=lr * first, factor=1 / first, milestones=[steps])
for lr, first, last, steps in ((0.3, 0.01, 0.5, 30), (2.0, 0.9, 0.0, 50)):
    make = lambda o: lrs.LinearLR(o, first, last, steps)
    show(POLYNOMIAL, rates(make, lr, 110), begin=lr * first, end=lr * last, steps=steps)

for lr, factor, milestones in (
    (0.1, 0.1, [30, 80]), (1.0, 0.7, [1, 2, 3, 50, 51, 99]), (0.3, 1.5, [0, 10, 10, 10, 40]),
    (0.05, 0.5, []), (3.0, 0.9, [5, 5, 200]),
):
    make = lambda o: lrs.MultiStepLR(o, milestones, factor)
    show(MULTI_STEP, rates(make, lr, 120), begin=lr, factor=factor, milestones=milestones)
make = lambda o: lrs.MultiStepLR(o, [1001, 99999, 999999, 1000000], 0.3)
show(MULTI_STEP, closed(make, 0.1, FAR), begin=0.1, factor=0.3,
     milestones=[1001, 99999, 999999, 1000000])

for lr, end, steps, multiple in (
    (0.1, 0.0, 10, 1), (1.0, 0.25, 10, 2), (0.1, 1e-3, 1, 2), (0.5, 0.7, 3, 3), (2.0, 0.0, 1, 1),
    (0.3, 0.0, 150, 2), (0.1, 0.01, 7, 10),
):
    make = lambda o: lrs.CosineAnnealingWarmRestarts(o, steps, multiple, end)
    show(RESTARTS, rates(make, lr, 120), begin=lr, end=end, steps=steps,
         multiple=0 if multiple == 1 else multiple)

for mode, kind in (("triangular", CYCLIC), ("triangular2", CYCLIC_HALVED),
                   ("exp_range", CYCLIC_EXPONENTIAL)):
    for lr, peak, up, down, factor in (
        (0.1, 1.0, 20, None, 0.99), (0.001, 0.01, 7, 4, 0.9), (1.0, 0.2, 5, 30, 1.01),
        (0.0, 2.0, 1, 1, 0.5), (0.1, 0.4, 3, 1, 1.0), (0.2, 0.3, 400, 100, 1 - 1e-4),
    ):
        make = lambda o: lrs.CyclicLR(o, lr, peak, up, down, mode, factor, cycle_momentum=False)
        show(kind, rates(make, 1.0, 120), begin=lr, peak=peak, steps=up, down_steps=down or 0,
             factor=factor if kind == CYCLIC_EXPONENTIAL else 0.0)

for linear, three_phase in ((1, 0), (0, 1), (1, 1)):
    for peak, steps, rise, div, final in (
        (0.1, 120, 0.3, 25.0, 1e4), (1.0, 110, 0.25, 10.0, 1e2), (2.0, 10, 0.2, 4.0, 10.0),
        (0.5, 101, 0.5, 2.0, 3.0), (0.5, 2, 0.3, 2.0, 3.0), (3.0, 100, 0.001, 0.5, 2.0),
    ):
        make = lambda o: lrs.OneCycleLR(
            o, peak, steps, pct_start=rise, anneal_strategy="linear" if linear else "cos",
            three_phase=bool(three_phase), div_factor=div, final_div_factor=final,
            cycle_momentum=False)
        show(ONE_CYCLE, rates(make, 1.0, steps), begin=peak / div, end=peak / div / final,
             peak=peak, rise=0.0 if rise == 0.3 else rise, steps=steps, linear=linear,
             three_phase=three_phase)

exponential = lambda o: lrs.ExponentialLR(o, 0.95)
linear_up = lambda o: lrs.LinearLR(o, 0.1, 1.0, 10)
cosine = lambda o: lrs.CosineAnnealingLR(o, 25, 0.01)
restarts = lambda o: lrs.CosineAnnealingWarmRestarts(o, 4, 2, 0.01)
multi_step = lambda o: lrs.MultiStepLR(o, [0, 5, 5, 20], 0.8)
cyclic = lambda o: lrs.CyclicLR(o, 0.4, 0.9, 6, 3, "triangular2", cycle_momentum=False)
one_cycle = lambda o: lrs.OneCycleLR(o, 1.6, 50, div_factor=4.0, cycle_momentum=False)
known = {
    exponential: schedule(EXPONENTIAL, begin=0.4, factor=0.95),
    linear_up: schedule(POLYNOMIAL, begin=0.4 * 0.1, end=0.4, steps=10),
    cosine: schedule(COSINE, begin=0.4, end=0.01, steps=25),
    restarts: schedule(RESTARTS, begin=0.4, end=0.01, steps=4, multiple=2),
    multi_step: schedule(MULTI_STEP, begin=0.4, factor=0.8, milestones=[0, 5, 5, 20]),
    cyclic: schedule(CYCLIC_HALVED, begin=0.4, peak=0.9, steps=6, down_steps=3),
    one_cycle: schedule(ONE_CYCLE, begin=0.4, end=0.4 / 1e4, peak=1.6, steps=50),
}
for make, milestones in (
    ([linear_up, cosine], [10]), ([exponential], []), ([linear_up, restarts, exponential], [7, 60]),
    ([cyclic, multi_step, cosine, linear_up], [1, 2, 50]), ([exponential, one_cycle], [60]),
    ([restarts, exponential], [0]),
):
    show_sequence(0.4, make, milestones, [known[f] for f in make])

# Metrics are multiples of 1/64, with some equal neighbors. In the last round, some are not finite.
rng = random.Random(7)
for mode in ("min", "max"):
    for threshold_mode in ("rel", "abs"):
        for i, (lr, options) in enumerate((
            (1.0, dict()),
            (0.5, dict(factor=0.5, patience=0, cooldown=3, threshold=0.0, eps=0.0)),
            (0.1, dict(factor=0.7, patience=2, min_lr=0.01, threshold=0.05)),
            (2.0, dict(factor=0.25, patience=1, cooldown=1, eps=0.09375, threshold=0.3)),
            (1.0, dict(factor=0.5, patience=3, cooldown=2, threshold=0.01, min_lr=0.1)),
        )):
            slope = 1 if mode == "max" else -1
            metrics = [(256 + slope * step + rng.randrange(-40, 40)) / 64 for step in range(110)]
            if i == 3:
                metrics = [metric - 4 for metric in metrics] # of both signs
            if i == 4:
                for step in [0, 1] + [rng.randrange(110) for k in range(30)]:
                    metrics[step] = rng.choice([float("nan"), slope * -float("inf")])
                metrics[100] = slope * float("inf")
            show_plateau(metrics, lr, mode=mode, threshold_mode=threshold_mode, **options)
