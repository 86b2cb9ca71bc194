"""Accelerate with accumulation and metrics: the loader is registered for its checkpoints."""

import os
import shutil
import warnings

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

# Batches of groups: several ranks fill up the last one of each group, in the middle of the epoch, which no remainder can tell.
grouped = {"shuffle": None, "ids": True, "lengths": [1 + number % 3 for number in range(len(every))], "bounds": 3}
for settings, exact in (({}, False), ({"last_batch": "mask"}, True), ({"last_batch": "drop"}, None)):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [accelerator.gather_for_metrics((batch["ids"].long(), batch["status"])) for batch in records(**grouped, **settings)]
    said = any("give last_batch" in str(warning.message) for warning in caught)
    assert said == (exact is False), (settings, [str(warning.message) for warning in caught])
    ids = [id for ids, status in found for id, kind in zip(ids.tolist(), status.tolist()) if kind == 0]
    assert exact is not True or sorted(ids) == list(range(len(every))), (settings, len(ids))
