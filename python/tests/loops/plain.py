"""A plain loop; with torchrun, DDP."""

import os

import torch
import torch.distributed as dist
from common import Model, folder, log, records

ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group("gloo")
loader, model = records(), Model()
if ddp:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
epoch, place = 0, f"{folder}/run.pt"
if os.path.exists(place):
    saved = torch.load(place, weights_only=True)
    model.load_state_dict(saved["model"])
    loader.load_state_dict(saved["loader"])
    epoch = saved["epoch"]
    print("resumed")
for epoch in range(epoch, 2):
    for record in loader:
        log(loader, record)
        optimiser.zero_grad()
        model(record).backward()
        optimiser.step()
        if loader.shard[0] == 0:
            torch.save({"model": model.state_dict(), "loader": loader.state_dict(), "epoch": epoch}, place + ".new")
            os.replace(place + ".new", place)
if ddp:
    dist.destroy_process_group()
