"""One rank of a job: gloo, a step of some ms, an all-reduce. argv: file, slow rank, kind"""
import os, sys, time, torch, torch.distributed as dist, numpy as np
import feedline.torch
torch.set_num_threads(1)
path, slow, kind, steps = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo")
rank = dist.get_rank()
def late(batch):
    time.sleep(0.06)
extra = {"map_batch": late} if rank == slow and kind == "map" else {}
loader = feedline.torch.Loader("records", path, record_bytes=4096, batch_size=16, workers=1, shuffle=0, **extra)
grad = torch.zeros(1000)
done = 0
for epoch in range(100):
    for batch in loader:
        time.sleep(0.01)
        dist.all_reduce(grad)
        done += 1
        if done == steps: break
    if done == steps: break
view = loader.across()
if rank == 0:
    print(view["text"] if "-v" in sys.argv else view["text"].splitlines()[-1])
dist.barrier()
os._exit(0)
