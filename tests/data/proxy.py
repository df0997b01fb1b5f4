#!/usr/bin/env python3
"""proxy.py - writes proxy.txt: samples of Ignite's DistributedProxySampler, for
tests/unit/sampler.c

    pip install pytorch-ignite; python3 tests/data/proxy.py >tests/data/proxy.txt

A line contains the length, the number of replicas, the epoch, the rank, the rank's number of
samples, a checksum of these samples (the sum of index * place, modulo 2^32, with places from 1),
and the first twelve samples. The inner sampler counts down from epoch + 3 * run, modulo the length,
where run is the number of times that it has run before in this epoch.
"""
import ignite
import torch
from ignite.distributed.auto import DistributedProxySampler
from torch.utils.data import Sampler


class Down(Sampler):
    def __init__(self, length):
        super().__init__(None)
        self.length, self.run = length, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        first = torch.initial_seed() + 3 * self.run  # Ignite seeds torch with the epoch
        self.run += 1
        return ((first + self.length - i) % self.length for i in range(self.length))


print(f"# made by proxy.py with ignite {ignite.__version__} and torch {torch.__version__}")
for length in (1, 2, 3, 7, 10, 97, 1000, 1797):
    for replicas in (1, 2, 3, 4, 7, 16):
        for epoch in (0, 1, 12):
            for rank in sorted({0, replicas // 2, replicas - 1}):
                sampler = DistributedProxySampler(Down(length), replicas, rank)
                sampler.set_epoch(epoch)
                indices = list(sampler)
                check = sum(index * place for place, index in enumerate(indices, 1)) % 2**32
                print(length, replicas, epoch, rank, len(indices), check, *indices[:12])
