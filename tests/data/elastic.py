#!/usr/bin/env python3
"""elastic.py - writes elastic.txt: samples of Horovod's ElasticSampler, for tests/unit/sampler.c

    python3 tests/data/elastic.py .../horovod/torch/elastic/sampler.py >tests/data/elastic.txt

The class is Horovod's own. Only the functions that give the rank and the number of ranks are
replaced. The sampler does not shuffle, so that an index is a position in the epoch's order. A line
contains the length, the number of ranks and the samples recorded per rank at first, the same two
numbers after a reset, the number of ranks after a second reset, the rank, its number of samples,
their checksum (as in sampler.py), and the first twelve samples.
"""
import importlib.util
import sys
import types

world = types.SimpleNamespace(rank=0, size=1)
for name in ("horovod", "horovod.torch"):
    sys.modules[name] = types.ModuleType(name)
ops = types.ModuleType("horovod.torch.mpi_ops")
ops.rank, ops.size = lambda: world.rank, lambda: world.size
sys.modules["horovod.torch.mpi_ops"] = ops
spec = importlib.util.spec_from_file_location("sampler", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

print("# made by elastic.py with the ElasticSampler of Horovod")
for length in (1, 7, 10, 97, 1797):
    for first, second, third in ((1, 2, 3), (4, 3, 2), (3, 3, 5), (8, 1, 4), (2, 5, 5)):
        for one, other in ((0, 0), (1, 0), (2, 3), (17, 11)):
            for rank in sorted({0, third // 2, third - 1}):
                world.size = first
                sampler = module.ElasticSampler(range(length), shuffle=False)
                one = min(one, len(sampler))
                sampler.record_batch(0, one)
                world.size = second
                sampler.reset()
                other = min(other, len(sampler))
                sampler.record_batch(0, other)
                world.size, world.rank = third, rank
                sampler.reset()
                if sampler.total_size > 2 * len(sampler.remaining_indices):
                    continue  # Horovod's own assert fails there
                indices = list(sampler)
                check = sum(index * place for place, index in enumerate(indices, 1)) % 2**32
                print(length, first, one, second, other, third, rank, end=" ")
                print(len(indices), check, *indices[:12])
