"""Train on several GPUs with DistributedDataParallel: each rank gets its part of every global batch."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn

import feedline.torch as fl
from small_data import pictures


def train(data: str) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(1)
    # Rank and world come from the process group: no sampler, and no set_epoch.
    loader = fl.images(data, size=32, dtype="f32", global_batch=32, shuffle=42, last_batch="drop", ids=True)
    model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 4)).to(loader.device)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    for _ in range(2):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += batch["ids"].tolist()

    parts: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, seen)
    everything = sorted(sample for part in parts for sample in part)
    print(f"rank {dist.get_rank()}: {len(seen)} samples")
    assert everything == sorted([*range(160), *range(160)]), "each epoch has each sample once, on one rank"
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1])
    else:  # yours: torchrun --nproc-per-node 8 several_gpus.py imagenet/train
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*torchrun, __file__, str(pictures(160))], check=True)
