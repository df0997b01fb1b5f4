#!/usr/bin/env python3
"""norm.py - writes norm.txt: batch statistics and clipped gradients, as torch computes them, for
tests/dist/metrics.c

    python3 tests/data/norm.py >tests/data/norm.txt

Numbers are hexadecimal floats. Batch normalization over the values of all ranks: "bn", the number
of ranks, the number of channels, and the number of values per channel on each rank; then x, dy and
dx of all ranks (rank, value, channel), and the mean and the biased variance of each channel. eps is
1e-5. Clipping: "clip", the number of gradients, max_norm and the norm; then for each gradient its
length, its values and its clipped values.
"""
import torch

torch.manual_seed(20)


def row(*tensors):
    print(*(float(x).hex() for t in tensors for x in t.flatten()))


print(f"# made by norm.py with torch {torch.__version__}")
BATCHES = (
    ((5,), 3, 0.0),
    ((4, 4), 2, 0.0),
    ((5, 0, 9), 4, 3.0),
    ((0, 1, 0, 2), 2, -50.0),
    ((64, 1), 1, 1e3),
)
CLIPS = (((3,), 1.0), ((1, 40, 7), 0.01), ((100,), 10.0), ((2, 2, 2, 2), 1e-6), ((5, 5), 0.0))
for counts, channels, offset in BATCHES:
    x = torch.randn(sum(counts), channels) * torch.arange(1, channels + 1) + offset
    x.requires_grad_()
    dy = torch.randn(sum(counts), channels)
    torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-5).backward(dy)
    print("bn", len(counts), channels, *counts)
    row(x)
    row(dy)
    row(x.grad)
    row(x.double().mean(0))
    row(x.double().var(0, unbiased=False))
for sizes, scale in CLIPS:
    for max_norm in (0.0, 1e-6, 0.1, 1.0, 1e4):
        gradients = [torch.randn(n) * scale for n in sizes]
        parameters = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
        for p, g in zip(parameters, gradients):
            p.grad = g.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        print("clip", len(sizes), max_norm.hex(), float(norm).hex())
        for p, g in zip(parameters, gradients):
            print(len(g))
            row(g)
            row(p.grad)
