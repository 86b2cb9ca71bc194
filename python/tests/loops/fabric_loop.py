"""Fabric starts the other ranks itself, once the loader is built; its checkpoints have the loader's state."""

import os

import torch
from common import Model, arguments, folder, log, records
from lightning.fabric import Fabric

loader = records()
fabric = Fabric(accelerator="cpu", devices=arguments.ranks, strategy="ddp" if arguments.ranks > 1 else "auto")
fabric.launch()
model = Model()
model, optimiser = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
run = {"model": model, "loader": loader, "epoch": 0}
place = f"{folder}/run.ckpt"
if os.path.exists(place):
    fabric.load(place, run)
    print("resumed")
fabric.barrier()
for run["epoch"] in range(run["epoch"], 2):
    for record in loader:
        log(loader, record)
        optimiser.zero_grad()
        fabric.backward(model(record))
        optimiser.step()
        fabric.save(place + ".new", run)
        if fabric.is_global_zero:
            os.replace(place + ".new", place)
        fabric.barrier()
