#!/usr/bin/env python3
"""sampler.py - writes sampler.txt: samples of torch.utils.data.DistributedSampler and results of
random.shuffle, for tests/unit/sampler.c

    python3 tests/data/sampler.py >tests/data/sampler.txt

A line contains the length, the number of replicas, drop_last, shuffle, the seed, the epoch, the
rank, the rank's number of samples, a checksum of these samples (the sum of index * place, modulo
2^32, with places from 1), and the first twelve samples. Other lines contain "partition", the
length, the seed, the number of a part with one of the fractions 0.7, 0.2 and 0.1, its number of
samples, their checksum, and the first twelve samples.
"""
import random

import torch
from torch.utils.data import DistributedSampler

ORDERS = ((False, 0, 0), (True, 0, 0), (True, 0, 3), (True, 1234, 7), (True, 2**33 + 5, 1))

print(f"# made by sampler.py with torch {torch.__version__}")
for length in (1, 2, 3, 8, 10, 97, 624, 1797, 20000):
    for replicas in (1, 2, 3, 4, 5, 8):
        for drop_last in (False, True):
            for shuffle, seed, epoch in ORDERS:
                for rank in sorted({0, replicas // 2, replicas - 1}):
                    sampler = DistributedSampler(
                        range(length),
                        replicas,
                        rank,
                        shuffle=shuffle,
                        seed=seed,
                        drop_last=drop_last,
                    )
                    sampler.set_epoch(epoch)
                    # With fewer samples than ranks, torch fails its own assert or yields nothing.
                    if drop_last and length < replicas:
                        indices = []
                    else:
                        indices = list(sampler)
                    check = sum(index * place for place, index in enumerate(indices, 1)) % 2**32
                    print(length, replicas, int(drop_last), int(shuffle), seed, epoch, end=" ")
                    print(rank, len(indices), check, *indices[:12])

# The DataPartitioner of the PyTorch tutorial.
for length in (0, 1, 2, 9, 10, 97, 1000, 65536, 65537):
    for seed in (0, 1, 1234, 2**31, 2**32 + 1, 2**63 + 9):
        indices, fractions = list(range(length)), (0.7, 0.2, 0.1)
        generator = random.Random()
        generator.seed(seed)
        generator.shuffle(indices)
        for part, fraction in enumerate(fractions):
            mine, indices = indices[: int(fraction * length)], indices[int(fraction * length) :]
            check = sum(index * place for place, index in enumerate(mine, 1)) % 2**32
            print("partition", length, seed, part, len(mine), check, *mine[:12])
