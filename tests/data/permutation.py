#!/usr/bin/env python3
"""permutation.py - writes permutation.txt: torch.randperm for counts below and above the limit
from which on it draws 64 bits per index, for tests/unit/sampler.c

    python3 tests/data/permutation.py >tests/data/permutation.txt

The script takes minutes and 2 GiB. A line with "large", count, seed, checksum and the first twelve
indices comes from torch.randperm itself. The checksum is the sum of index * (place * K + 1), modulo
2^64, with places from 0 and K as below. A line with "small", count, seed and all indices comes from
the algorithm for large counts, written here in Python, with the 64-bit numbers that torch draws for
this seed.
"""
import sys

import numpy as np
import torch

K = np.uint64(0x9E3779B97F4A7C15)
LARGE = (214748363, 214748364, 214748400)


def generator(seed):
    g = torch.Generator()
    g.manual_seed(seed)
    return g


def large(count, seed):
    order = torch.randperm(count, generator=generator(seed)).numpy().view(np.uint64)
    total = 0
    for i in range(0, count, 1 << 22):
        part = order[i:i + (1 << 22)]
        place = np.arange(i, i + len(part), dtype=np.uint64)
        total += int((part * (place * K + np.uint64(1))).sum(dtype=np.uint64))
    return [total % 2**64, *order[:12]]


def small(count, seed):
    draws = torch.empty(count, dtype=torch.int64).random_(-2**63, None, generator=generator(seed))
    order = []
    for i, draw in enumerate(draws.tolist()):
        order.append(i)
        k = draw % 2**64 % (i + 1)
        order[i], order[k] = order[k], i
    return order


print(f"# made by permutation.py with torch {torch.__version__}")
for count in (1, 2, 3, 10, 100, 1000):
    for seed in (0, 7, 2**32 - 1):
        print("small", count, seed, *small(count, seed))
for count in LARGE if len(sys.argv) == 1 else ():
    print("large", count, 7, *large(count, 7), flush=True)
