"""Accelerate with accumulation and metrics: the loader is registered for its checkpoints."""

import os
import shutil

import torch
from accelerate import Accelerator
from common import Model, folder, log, records

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = Model()
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimiser, loader, validation = accelerator.prepare(model, optimiser, records(), records(shuffle=None))
accelerator.register_for_checkpointing(loader)
place = f"{folder}/run"
if os.path.exists(place):
    accelerator.load_state(place)
    print("resumed")
for epoch in range(loader.next_epoch, 2):
    for record in loader:
        log(loader, record)
        with accelerator.accumulate(model):
            optimiser.zero_grad()
            accelerator.backward(model(record))
            optimiser.step()
        accelerator.save_state(place + ".new")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(place + ".old", ignore_errors=True)
            if os.path.exists(place):
                os.rename(place, place + ".old")
            os.rename(place + ".new", place)
        accelerator.wait_for_everyone()
    assert accelerator.sync_gradients, "the last window of the epoch is open"
    rows = torch.cat([accelerator.gather_for_metrics(record) for record in validation])
    every = torch.cat(list(records(shuffle=None, shard=None)))
    assert torch.equal(rows, every), (rows.shape, every.shape)
