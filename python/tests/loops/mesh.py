"""Ranks of a mesh of 2 × 2: those of the axis tp share data. Started by torchrun; each rank checks what it reads."""

import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import feedline.numpy
import feedline.torch as fl
from feedline.errors import ConfigError

path, count, batch = sys.argv[1], 101, 8


def records(**settings):
    settings = {"batch_size": batch, **settings}
    return fl.records(path, record_bytes=8, shuffle=5, device="cpu", ids=True, **settings)


def ids(batches):
    return [id for batch in batches for id in batch["ids"].tolist()]


def refused(call, *words):
    try:
        call()
    except ConfigError as error:
        assert all(word in str(error) for word in words), error
        return str(error)
    raise AssertionError(words)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
told = records()
assert told.shard == (rank, world) and len(told) == 4
# A mesh of one axis has the group of all processes.
tensor = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
refused(lambda: len(records()), "are a mesh of tp=4", "shard=None where all processes read the same")
del tensor
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

# The default, also of a loader that is older than the mesh.
words = 'the 4 processes of torch.distributed are a mesh of dp=2, tp=2, and shard="env" gives each process other samples'
said = refused(lambda: len(records()), words, 'give the axis of the data, shard=mesh["dp"]')
refused(lambda: next(iter(told)), words)
refused(lambda: records(shard=mesh), "shard: a mesh of dp=2, tp=2: give the axis of the data")
if rank == 0:
    print("refused:", said)

# The axis of the data, or its process group: the same ids in a group, others in the other one.
for shard in (mesh["dp"], mesh["dp"].get_group(), (rank // 2, 2)):
    loader = records(shard=shard)
    assert loader.shard == (rank // 2, 2) and len(loader) == 7
    fl.agree(loader, replicas=mesh["tp"])
    fl.agree(loader, replicas=mesh["tp"].get_group())
    mine = ids(loader)
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    assert everyone[0] == everyone[1] and everyone[2] == everyone[3]
    assert set(everyone[0]) | set(everyone[2]) == set(range(count))
    # The epoch is filled up to 112 rows.
    assert len(everyone[0]) == len(everyone[2]) == 56 and len(set(everyone[0]) & set(everyone[2])) <= 11

# A wrong setting is found on every rank before anything is read, also that of one process alone.
wrong = records(shard=(rank, world))
fl.agree(wrong)
refused(lambda: fl.agree(wrong, replicas=mesh["tp"]), "process 0 reads as rank 0 of 4, process 1 as rank 1")
one = records(shard=mesh["dp"]) if rank != 3 else records(shard=(3, 4), batch_size=None, global_batch=16)
refused(lambda: fl.agree(one), "process 0 is one of 2 data ranks, process 3 one of 4")

# States of all ranks are the same, and go on with another mesh, also around skipped batches.
loader = records(shard=mesh["dp"])
loader.skip(range(3, 5))
for _ in zip(range(2), loader):
    pass
state = loader.state_dict()
fl.agree(loader)
other = feedline.numpy.records(path, record_bytes=8, batch_size=None, global_batch=16, shuffle=5, ids=True, shard=(rank, 4), last_batch="pad")
other.load_state_dict(state)
rest = [batch["ids"].tolist() for batch in other]
everyone = [None] * world
dist.all_gather_object(everyone, rest)
whole = records(shard=None, batch_size=None, global_batch=16, last_batch="pad")
want = [batch["ids"].tolist() for batch in whole]
gathered = [[id for part in parts for id in part] for parts in zip(*everyone)]
assert gathered == [want[number] for number in (2, 5, 6)], (gathered, want)

# A mesh whose axes all are the data's, and one that has other names.
deep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
refused(lambda: records(shard=deep), 'shard=mesh["dp_replicate", "dp_shard"]._flatten("data")')
flat = records(shard=deep._flatten("data"))
assert flat.shard == (rank, world)
print("ok")
dist.destroy_process_group()
