"""Ranks that share data: what `shard` may be beside numbers, and processes whose default would be wrong.

With tensor, context or pipeline parallelism several processes must read the same samples. Their global ranks do not tell: only
the mesh does.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from .errors import ConfigError

# Axes whose ranks read samples of their own. Those of experts lie across them.
_OWN = re.compile(r"(ddp|dp|fsdp|hsdp|data|batch|replicate|shard|ep|edp|efsdp|expert)(?![a-z])", re.I)
# Axes whose ranks share them, also where a mesh has no other axis.
_SHARED = re.compile(r"(tp|etp|cp|sp|pp|mp|tensor|context|sequence|seq|pipeline|pipe|stage|model)(?![a-z])", re.I)


def _module(name: str) -> Any:
    return sys.modules.get(name)


def of(shard: Any) -> Any:
    """Rank and world of a one-dimensional DeviceMesh or a process group; anything else as it is."""
    dist, device_mesh = _module("torch.distributed"), _module("torch.distributed.device_mesh")
    if dist is None or not dist.is_available():
        return shard
    if device_mesh is not None and isinstance(shard, device_mesh.DeviceMesh):
        if shard.ndim != 1:
            raise ConfigError(f"shard: a mesh of {_words(shard)}: give the axis of the data, {_advice(shard)}")
        if shard.get_coordinate() is None:
            raise ConfigError("shard: this process is not in the mesh: build the loader where it is, or give (rank, world)")
        return shard.get_local_rank(), shard.size()
    # What torch.distributed.new_group gives a process outside.
    if isinstance(shard, int) and shard == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("shard: this process is not in the group: build the loader where it is, or give (rank, world)")
    if isinstance(shard, dist.ProcessGroup):
        if (rank := dist.get_rank(shard)) < 0:
            raise ConfigError("shard: this process is not in the group: build the loader where it is, or give (rank, world)")
        return rank, dist.get_world_size(shard)
    return shard


def check() -> None:
    """Refuses the default, by which each process of torch.distributed reads other samples, where some must share them.

    Sees every DeviceMesh of the process (also those of Lightning, Accelerate and Transformers) and Megatron's groups. What it
    cannot tell passes: groups of DeepSpeed, and a mesh of one axis without a telling name.
    """
    dist = _module("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return
    world = dist.get_world_size()
    for mesh in _meshes(dist):
        if _shares(mesh):
            words = f"the {world} processes of torch.distributed are a mesh of {_words(mesh)}"
            raise ConfigError(f"{words}, and shard=\"env\" gives each process other samples: give the axis of the data, {_advice(mesh)}")
    megatron = _module("megatron.core.parallel_state")
    try:
        count = world if megatron is None or not megatron.model_parallel_is_initialized() else megatron.get_data_parallel_world_size()
    except Exception:
        # Another Megatron than the ones known here.
        return
    if count < world:
        words = f"Megatron has {count} data-parallel ranks of {world} processes"
        advice = "give shard=parallel_state.get_data_parallel_group(), or shard=(rank, world) of the data"
        raise ConfigError(f"{words}, and shard=\"env\" gives each process other samples: {advice}")


def _meshes(dist: Any) -> list[Any]:
    """Every DeviceMesh of the process. PyTorch has no list of them."""
    device_mesh = _module("torch.distributed.device_mesh")
    if device_mesh is None:
        return []
    # A look at all objects takes some 0.1 s. The groups do not tell: that of all processes may be a mesh. Not isinstance, which
    # would run code of lazy modules and proxies.
    return [mesh for mesh in gc.get_objects() if type(mesh) is device_mesh.DeviceMesh]


def _axes(mesh: Any) -> list[tuple[str, int]]:
    """Name and size of each axis that has several ranks."""
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    axes = [(name, mesh.size(number)) for number, name in enumerate(names)]
    return [axis for axis in axes if axis[1] > 1]


def _shares(mesh: Any) -> bool:
    axes = _axes(mesh)
    if len(axes) == 1:
        return _SHARED.match(axes[0][0]) is not None
    return not all(_OWN.match(name) for name, _ in axes)


def _words(mesh: Any) -> str:
    return ", ".join(f"{name}={size}" if name else str(size) for name, size in _axes(mesh)) or "one process"


def _advice(mesh: Any) -> str:
    own = [name for name, _ in _axes(mesh) if _OWN.match(name)]
    if len(own) == 1:
        return f'shard=mesh["{own[0]}"]'
    if own:
        names = ", ".join(f'"{name}"' for name in own)
        return f'shard=mesh[{names}]._flatten("data")'
    return "shard=mesh[AXIS], shard=None where all processes read the same, or shard=(rank, world) of the data"


# Seconds behind the own report from which on one in a folder counts as that of a dead process.
_STALE = 60.0
# The loader of this process that writes a file of a folder.
_WRITERS: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()
# Reports of a folder from before belong to an earlier job.
_STARTED = time.time()


def reports(loader: Any, by: Any) -> list[str]:
    """The report of each process of the job, as JSON."""
    if isinstance(by, (str, os.PathLike)):
        return _in_folder(loader, Path(by))
    if hasattr(by, "Get_rank"):
        return list(by.allgather(loader._rank_report(by.Get_rank(), by.Get_size())))
    dist = _module("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        give = "give a process group, a communicator of mpi4py, or a folder"
        if by is not None:
            raise ConfigError(f"across: by={by!r}: {give}")
        if (world := loader._launched()[1]) > 1:
            raise ConfigError(f"across: the launcher started {world} processes, and torch.distributed is not initialised: {give}")
        return [loader._rank_report(0, 1)]
    if dist.get_rank(by) < 0:
        raise ConfigError("across: this process is not in the group: call it in the processes of the group")
    gathered: list[Any] = [None] * dist.get_world_size(by)
    dist.all_gather_object(gathered, loader._rank_report(dist.get_rank(by), len(gathered)), group=by)
    return gathered


def _in_folder(loader: Any, folder: Path) -> list[str]:
    number, count = loader._launched()
    folder.mkdir(parents=True, exist_ok=True)
    own, now = folder.resolve() / f"rank-{number}.json", time.time()
    if _WRITERS.setdefault(own, loader) is not loader:
        raise ConfigError(f"across: another loader of this process reports in {folder}: give each loader a folder of its own")
    # Renamed, so that nobody reads half of it.
    new = own.with_suffix(f".{os.getpid()}.new")
    try:
        new.write_text(json.dumps({"at": now, "report": json.loads(loader._rank_report(number, count))}))
        new.replace(own)
    except OSError:
        new.unlink(missing_ok=True)
        del _WRITERS[own]
        raise
    found = [_report(path) for path in folder.glob("rank-*.json")]
    oldest = max(now - _STALE, min(now, _STARTED))
    return [json.dumps(report) for at, report in found if at >= oldest and report["world"] == count]


def _report(path: Path) -> tuple[float, dict[str, Any]]:
    try:
        read = json.loads(path.read_text())
        at, report = float(read["at"]), read["report"]
        report["world"]
        return (at if math.isfinite(at) else 0.0), report
    except OSError:
        # Another process replaces it.
        return 0.0, {"world": 0}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: no report of a rank: remove it") from None
