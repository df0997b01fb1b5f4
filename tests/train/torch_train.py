"""torch_train.py - trains with DDP, PowerSGD and FSDP2 over idist and over gloo: equal losses"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_ranks

STEPS = 50


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 4),
    )


def ddp(group):
    # Small buckets, so that a step has several all_reduces under way.
    return DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.005)


def powersgd(group):
    model = DistributedDataParallel(network(), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def fsdp(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = network()
    for layer in (model[0], model[3], model[5]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses(make, group, rank):
    """Returns the loss of every step on this rank."""
    model = make(group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    images = torch.Generator().manual_seed(rank)
    result = []
    for _ in range(STEPS):
        x = torch.randn(32, 16, generator=images)
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return torch.tensor(result)


def train(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size)
    gloo = dist.new_group(backend="gloo")
    for make in (ddp, powersgd, fsdp):
        over_idist = losses(make, dist.group.WORLD, rank)
        over_gloo = losses(make, gloo, rank)
        assert over_idist[-1] < 0.7 * over_idist[0], over_idist
        torch.testing.assert_close(over_idist, over_gloo, rtol=1e-3, atol=1e-3)
        if rank == 0:
            worst = (over_idist - over_gloo).abs().max().item()
            print(make.__name__, size, "last loss", over_idist[-1].item(), "differs by", worst)
    dist.destroy_process_group()


if __name__ == "__main__":
    for count in (2, 3):
        torch_ranks.check_all(count, train)
