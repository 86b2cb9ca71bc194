"""torch.multiprocessing.spawn: no variable says the ranks, and the loader is built before the processes know each other."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import Model, arguments, folder, log, records


def train(rank, world):
    loader = records()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{os.getppid()}", rank=rank, world_size=world)
    assert loader.shard == (rank, world)
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    epoch, place = 0, f"{folder}/run.pt"
    if os.path.exists(place):
        saved = torch.load(place, weights_only=True)
        loader.load_state_dict(saved["loader"])
        epoch = saved["epoch"]
        print("resumed")
    dist.barrier()
    for epoch in range(epoch, 2):
        for record in loader:
            log(loader, record)
            optimiser.zero_grad()
            model(record).backward()
            optimiser.step()
            if rank == 0:
                torch.save({"epoch": epoch, "loader": loader.state_dict()}, place + ".new")
                os.replace(place + ".new", place)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, (arguments.ranks,), arguments.ranks)
