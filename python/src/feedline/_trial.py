"""The data of another loader through feedline, for some seconds: `observe(loader, try_it=True)`.

    loader ──what it reads──► a feedline loader ──batches, each with a step of the measured length──► rate
"""

from __future__ import annotations

import time
from typing import Any

from ._loader import Loader

#: Seconds of a trial, and the batches before it that do not count.
SECONDS, WARM = 4.0, 3
#: Transforms of torchvision that a loader of feedline does as well, by class; others make a source one that cannot be tried.
SAME = {"ToTensor", "PILToTensor", "ToImage", "ToDtype", "ConvertImageDtype", "ToPureTensor", "Normalize", "RandomHorizontalFlip"}


class Unknown(Exception):
    """Why a source cannot be tried."""


def trial(loader: Any, given: Any, snapshot: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    """The rate of the loop with a loader of feedline in place of `loader`."""
    try:
        tried = given if isinstance(given, Loader) else _same(loader, snapshot["loader"])
    except Unknown as why:
        return {"rate": None, "text": f"trial      not possible: {why}; give a loader of feedline: observe(loader, try_it=fl.images(...))"}
    loop = snapshot["loop"]
    steps = max(1, loop["steady_batches"])
    step = (loop["steady_ns"] - loop["waited_ns"]) / steps / 1e9
    computing = min(step, loop["step_cpu_ns"] / steps / 1e9)
    in_samples = loop["samples"] > 0
    rate = _rate(tried, step, computing, in_samples)
    if given is not tried:
        tried.close()
    if rate is None:
        return {"rate": None, "text": "trial      not possible: the data have too few batches for it"}
    times = rate / verdict["rate"] if verdict["rate"] > 0 else float("inf")
    unit = "samples/s" if in_samples else "batches/s"
    text = f"trial      through feedline, with a step of {1e3 * step:.1f} ms: {rate:,.0f} {unit}, {times:.2f} times as many"
    return {"rate": rate, "times": times, "step_s": step, "text": text}


def _rate(loader: Loader[Any], step: float, computing: float, in_samples: bool) -> float | None:
    """Items per second of the loop: each batch is followed by a step, `computing` of it on a core."""
    count, items, began = 0, 0, 0.0
    until = time.monotonic() + 10 * SECONDS
    while time.monotonic() < until:
        passed = 0
        for batch in loader:
            passed += 1
            count += 1
            if count == WARM:
                began = time.monotonic()
                continue
            _step(step, computing)
            if count > WARM:
                items += _length(batch) if in_samples else 1
                if (now := time.monotonic()) - began > SECONDS:
                    return items / (now - began)
            del batch
        if not passed:
            return None
    return None


def _length(batch: Any) -> int:
    from ._observe import first_length

    return first_length(batch) or 0


def _step(seconds: float, computing: float) -> None:
    """A step that takes a core for a part of its time."""
    end = time.perf_counter() + seconds
    until = time.perf_counter() + computing
    while time.perf_counter() < until:
        pass
    if (rest := end - time.perf_counter()) > 0:
        time.sleep(rest)


def _same(loader: Any, facts: dict[str, Any]) -> Loader[Any]:
    """A loader of feedline that reads what this one reads."""
    dataset = getattr(loader, "dataset", None)
    names = {cls.__name__ for cls in type(dataset).__mro__}
    batch_size = facts["batch_size"]
    if dataset is None or batch_size is None:
        raise Unknown("the data set and the batch size of this loader are not known")
    if not names & {"ImageFolder", "DatasetFolder"}:
        raise Unknown(f"{type(dataset).__name__} is no ImageFolder")
    if dataset.target_transform is not None or (dataset.transforms is None and dataset.transform is None):
        raise Unknown("its transforms are not those of a picture alone")
    import feedline.torch as fl

    sampler = type(getattr(loader, "sampler", None)).__name__
    settings: dict[str, Any] = {"shuffle": 0 if "Random" in sampler else None, **_picture(dataset.transform)}
    return fl.images(dataset.root, batch_size=batch_size, shard=None, **settings)


def _picture(transform: Any) -> dict[str, Any]:
    """Settings of pictures that do the work of a torchvision transform."""
    settings: dict[str, Any] = {"augment": False}
    for part in getattr(transform, "transforms", [transform]):
        name = type(part).__name__
        size = getattr(part, "size", None)
        if name == "RandomResizedCrop":
            settings |= {"size": _square(size), "augment": True}
        elif name == "CenterCrop":
            settings["size"] = _square(size)
        elif name == "Resize" and isinstance(size, (tuple, list)) and len(size) == 2:
            settings["size"] = tuple(size)
        elif name == "Normalize":
            settings |= {"normalize": (list(part.mean), list(part.std)), "dtype": "f32"}
        elif name == "ToTensor":
            settings["dtype"] = "f32"
        elif name not in SAME | {"Resize"}:
            raise Unknown(f"the transform {name} is none of feedline's")
    if "size" not in settings:
        raise Unknown("its pictures are not cropped or resized to one size")
    return settings


def _square(size: Any) -> int:
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    if height != width:
        raise Unknown(f"crops of {height} x {width} are not square")
    return int(height)
