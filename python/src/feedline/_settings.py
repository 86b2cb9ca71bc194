"""Values and names of settings: other libraries' lists and numbers as Python's, and which name was meant."""

from __future__ import annotations

import difflib
import operator
import os
import reprlib
from typing import Any, Iterable, Mapping

#: Arguments of PyTorch's DataLoader, its samplers and transforms: what stands for them here.
ELSEWHERE = {
    "num_workers": "give `workers`",
    "drop_last": 'give last_batch="drop"',
    "pin_memory": "leave it out: host batches of a GPU loader are pinned",
    "pin_memory_device": "give `device`",
    "prefetch_factor": "give `slots`, the batches in memory at once",
    "persistent_workers": "leave it out: workers are threads that live as long as the loader",
    "collate_fn": "rows are batched by the loader; give `map_batch` to change a batch",
    "sampler": "give `indices`, `shuffle`, `sample_weights`, `weights` or `schedule`",
    "batch_sampler": "give `batch_size` with `indices`, `shuffle` or `weights`",
    "worker_init_fn": "leave it out: workers are threads; `map_batch` gets the seed of each batch",
    "num_samples": "give `draws`, with `sample_weights`",
    "class_weights": "give `weights_of`, or `sample_weights`",
    "timeout": "give `stall_deadline`, in seconds",
    "generator": "give `shuffle`, the seed of the order",
    "multiprocessing_context": "leave it out: workers are threads",
    "rank": "give shard=(rank, world)",
    "world_size": "give shard=(rank, world)",
    "num_replicas": "give shard=(rank, world)",
    "num_shards": "give shard=(rank, world)",
    "transform": "give `size` and `dtype` for pictures, `map_batch` for others",
}


#: Settings that are objects and functions, not values.
_OBJECTS = {"device", "dtype", "map_batch", "adds", "decoders", "sharding", "streams", "samples", "table"}
_PLAIN = {bool, int, float, str, type(None)}


def plain(value: Any) -> Any:
    """A value as numbers, texts, tuples and dicts of Python: arrays, tensors, lists of YAML and others by their protocols."""
    if type(value) in _PLAIN or isinstance(value, (str, bytes, os.PathLike, type)):
        return value
    if callable(listed := getattr(value, "tolist", None)):
        return plain(listed())
    if isinstance(value, Mapping) or all(hasattr(value, name) for name in ("keys", "__getitem__")):
        return {key: plain(value[key]) for key in value.keys()}
    if not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        return value
    if type(value) in (list, tuple, range) and set(map(type, value)) <= _PLAIN:
        return tuple(value) if type(value) is list else value
    return tuple(plain(part) for part in value)


def values(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings, with plain values."""
    return {name: value if name in _OBJECTS else plain(value) for name, value in settings.items()}


def whole(name: str, number: Any, least: int = 0) -> int:
    """A whole number, which True and False are not."""
    number = plain(number)
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{name} {number!r}: give a whole number from {least}")
    if operator.index(number) < least:
        raise ValueError(f"{name} {number!r}: give a whole number from {least}")
    return operator.index(number)


def numbers(name: str, given: Any) -> Any:
    """A list of numbers, which True and False are not."""
    values = plain(given)
    if not isinstance(values, (tuple, range)) or not set(map(type, values)) <= {int, float}:
        raise TypeError(f"{name}={reprlib.repr(given)}: give a list of numbers")
    return values


def meant(name: str, known: Iterable[str]) -> str:
    """What to give in place of a setting that there is not; begins with a link."""
    if name in ELSEWHERE:
        return f": {ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else ""


def paths(path: Any) -> str | list[str]:
    """One path, or several, as strings."""
    try:
        several = None if isinstance(path, (str, os.PathLike)) else [os.fspath(part) for part in path]
    except TypeError:
        raise TypeError(f"path={path!r}: give a path or a list of paths") from None
    if several == []:
        raise ValueError(f"path={path!r}: give a path, or a list of at least one")
    return os.fspath(path) if several is None else several


def epoch(number: Any) -> int:
    """The number of an epoch."""
    number = whole("epoch", number)
    if number >= 2**64 - 1:
        raise ValueError(f"epoch {number}: epochs have 64 bits")
    return number
