"""train_ddp.py - trains a network with DistributedDataParallel over idist

run:  torchrun --nproc-per-node 2 examples/apps/torch/train_ddp.py

Expected output, after the lines of torchrun:

    2 ranks over idist
    epoch 1: loss 0.5255, accuracy 79.53 %
    epoch 2: loss 0.2752, accuracy 93.34 %
    epoch 3: loss 0.1735, accuracy 96.50 %
    epoch 4: loss 0.1233, accuracy 97.53 %
    epoch 5: loss 0.0998, accuracy 98.28 %
    the same weights on every rank

The two lines with idist_torch and "idist" are all that differs from a program for gloo.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import idist_torch  # noqa: F401, registers the backend

EPOCHS, STEPS, BATCH, FEATURES = 5, 50, 32, 20


def batches(rank, epoch):
    """Yields random points, labeled by the side of a plane on which they are."""
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    for _ in range(STEPS):
        x = torch.randn(BATCH, FEATURES, generator=generator)
        yield x, (x.sum(1) > 0).long()


def train_epoch(model, optimizer, epoch):
    """Returns loss and accuracy, averaged over the batches of all ranks."""
    sums = torch.zeros(2)
    for x, y in batches(dist.get_rank(), epoch):
        output = model(x)
        loss = torch.nn.functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums += torch.stack([loss.detach(), (output.argmax(1) == y).float().mean()])
    dist.all_reduce(sums, dist.ReduceOp.AVG)
    return (sums / STEPS).tolist()


def main():
    dist.init_process_group("idist")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{size} ranks over {dist.get_backend()}", flush=True)
    torch.manual_seed(rank)  # DDP broadcasts the weights of rank 0
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1, EPOCHS + 1):
        loss, accuracy = train_epoch(model, optimizer, epoch)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {100 * accuracy:.2f} %", flush=True)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(every, weights)
    equal = all(torch.equal(weights, other) for other in every)
    if rank == 0:
        print(("the same" if equal else "DIFFERENT") + " weights on every rank", flush=True)
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
