"""torch_ignite.py - the collectives of Ignite's tutorial, on 3 ranks over the backend idist"""

import ignite.distributed as ignite
import torch
import torch.distributed as dist

import torch_ranks


def tutorial(rank, size, folder):
    torch_ranks.init(folder / "store", rank, size)
    assert (ignite.backend(), ignite.get_rank(), ignite.get_world_size()) == ("idist", rank, size)

    x = torch.tensor([1 + 2 * rank, 2 + 2 * rank])
    assert ignite.all_reduce(x, op="SUM").tolist() == [9, 12]
    assert ignite.all_reduce(2.0 * rank, op="MAX") == 4.0
    assert ignite.all_gather(2.0 * rank) == [0.0, 2.0, 4.0]
    assert ignite.all_gather(f"rank {rank}") == ["rank 0", "rank 1", "rank 2"]
    assert ignite.all_gather({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert ignite.broadcast(f"hello from rank {rank}", src=1) == "hello from rank 1"
    x = ignite.broadcast(torch.tensor([7.0, 8.0]) if rank == 0 else None, src=0, safe_mode=True)
    assert x.tolist() == [7.0, 8.0]
    with ignite.one_rank_first():
        pass
    ignite.barrier()

    group = ignite.new_group([0, 2])
    if rank != 1:
        assert ignite.all_reduce(float(rank + 1), group=group) == 4.0
    dist.destroy_process_group()


if __name__ == "__main__":
    torch_ranks.check_all(3, tutorial)
    print("ok tutorial")
