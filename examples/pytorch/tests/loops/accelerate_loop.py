"""Accelerate: the loader is registered for its checkpoints."""

import os

import torch
from accelerate import Accelerator
from common import Model, folder, log, records

accelerator = Accelerator(cpu=True)
model = Model()
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimiser, loader = accelerator.prepare(model, optimiser, records())
accelerator.register_for_checkpointing(loader)
place = f"{folder}/run"
if os.path.exists(place):
    accelerator.load_state(place)
    print("resumed")
for epoch in range(loader.state_dict()["epoch"], 2):
    for record in loader:
        log(loader, record)
        optimiser.zero_grad()
        accelerator.backward(model(record))
        optimiser.step()
        accelerator.save_state(place)
