"""The profiler around another loader: `feedline.observe`.

    loop ──for batch in observed──► Observed ──next──► the loader's own iterator
                                       │ starts, asks, got, ends
                                       ▼
                                 _native.Observer, which samples the processes of the kernel meanwhile

The loader is not changed. Settings of known loaders are read from their attributes, to give advice in their terms.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

from . import _html
from ._gpu import Steps
from ._loader import Loader
from ._native import Observer

__all__ = ["Observed", "observe"]

Batch = TypeVar("Batch")
#: Attributes in which others hold a DataLoader: Accelerate, Lightning Fabric, WebDataset, an observed loader.
WRAPPED = ("base_dataloader", "_dataloader", "dataloader", "pipeline", "loader", "_loader")


def observe(loader: Any, *, try_it: Any = False) -> Observed[Any]:
    """Measures a loop over any loader, and says what limits it and which of its settings to change.

        loader = feedline.observe(DataLoader(...))
        for epoch in range(3):
            for batch in loader: ...
        print(loader.report())

    `loader` is any iterable: PyTorch's DataLoader, DALI, tf.data, WebDataset, Grain, Streaming, a generator. Attributes and the
    length of the loader are those of the observed one, too. It needs Linux. Where a framework makes another loader of a DataLoader,
    observe that: `observe(accelerator.prepare(loader))`, `observe(fabric.setup_dataloaders(loader))`.

    `try_it=True` also reads the same data through feedline for some seconds, after the first epoch, where feedline reads such a source:
    `report()` and `verdict()["trial"]` say the rate. Give a loader of feedline to have that one tried.
    """
    if isinstance(loader, Loader):
        raise TypeError("a loader of feedline measures itself: print(loader.report())")
    if isinstance(loader, Observed):
        raise TypeError("the loader is observed already")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{type(loader).__name__}: give an iterable of batches, such as a DataLoader")
    return Observed(loader, try_it)


class Watch:
    """What `Observed` and the callbacks of frameworks share: the numbers of a loop, and their texts."""

    def __init__(self, facts: dict[str, Any]):
        self._facts = facts
        self._observer = Observer(json.dumps(facts))
        self._trial: dict[str, Any] | None = None

    def report(self) -> str:
        """What limits the loop, with evidence and advice, and the numbers."""
        text = self._observer.report()
        return text if self._trial is None else f"{text}{self._trial['text']}\n"

    def verdict(self) -> dict[str, Any]:
        """What limits the loop, for programs.

        `headline` in words; `cause`: "not_starved", "workers", "transform", "storage", "network_storage", "network", "blocked",
        "worker_start", "slow_worker", "uneven", "pipe", "gil", "small_batches", "pinning", "cpu_quota", "other_programs", "cores" or
        "unknown"; `also`, a second one or None; `rate` in samples per second (batches per second if the batches' samples are not known);
        `starved_share`, the part of the time within epochs in which the loop waited (starts of epochs count apart); `strength`
        (`"strong"`, `"fair"`, or `{"thin": {"why": ...}}`). `advice`, the most promising first: dicts of `remedy`, `setting` and `value`
        where it is a setting of the loader, `prediction` (`rate`) where there is one, and `text`. `evidence`: dicts of `measure`,
        `value`, `unit` and `text`. `trial`: the rate through feedline, if it was tried.
        """
        headline, diagnosis = self._observer.diagnosis()
        verdict = {"headline": headline, **json.loads(diagnosis)}
        return verdict if self._trial is None else {**verdict, "trial": self._trial}

    def snapshot(self) -> dict[str, Any]:
        """All measurements: nanoseconds, bytes and counts, of the loop, each worker, other threads and the machine."""
        return json.loads(self._observer.observation())

    def _repr_html_(self) -> str:
        """The report and a bar for the loop and each worker, for notebooks."""
        return _html.observed(self.report(), self.verdict(), self.snapshot())


class Observed(Watch, Generic[Batch]):
    """A loader that is measured, see `observe`."""

    #: Attributes of its own: every other one is the loader's.
    _own = {"_facts", "_observer", "_trial", "_loader", "_try_it", "_ended", "_steps"}

    def __init__(self, loader: Any, try_it: Any = False):
        super().__init__(facts(loader))
        self._loader = loader
        self._try_it = try_it
        self._ended = False
        self._steps = Steps()

    def __iter__(self) -> Iterator[Batch]:
        if self._ended:
            yield from self._loader
            return
        observer, steps, before = self._observer, self._steps, _children()
        steps.restart()
        observer.starts()
        iterator: Any = None
        try:
            iterator = iter(self._loader)
            batch: Any = next(iterator, self)
            if batch is self:
                return
            observer.works_with(_workers(iterator, before))
            while True:
                observer.got(rows(batch, self._facts))
                steps.begin()
                yield batch
                # The loop may have no further use for it, and the loader for its memory.
                del batch
                steps.end()
                observer.asks()
                batch = next(iterator, self)
                if batch is self:
                    return
        finally:
            observer.ends()
            # Its workers would run beside the trial.
            iterator = batch = None
            if steps.used:
                observer.set_gpu(*steps.times())
            self._try()

    def __len__(self) -> int:
        return len(self._loader)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Frameworks make a part for each rank of what is a DataLoader, and leave anything else whole.
        data = sys.modules.get("torch.utils.data")
        return type(self._loader) if data is not None and isinstance(self._loader, data.DataLoader) else Observed

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __reduce__(self) -> Any:
        # A copy, or the loader in another process, has measurements of its own.
        return type(self), (self._loader, self._try_it)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def __getattr__(self, name: str) -> Any:
        # Of the loader. Own attributes are not looked up here, but in a copy that is being made.
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __enter__(self) -> Observed[Batch]:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._observer.ends()
        self._ended = True

    def _try(self) -> None:
        if self._try_it is False or self._trial is not None:
            return
        from ._trial import trial

        self._trial = trial(self._loader, self._try_it, self.snapshot(), self.verdict())


def rows(batch: Any, facts: dict[str, Any]) -> int:
    """Samples of a batch; 0 if that cannot be told."""
    size: int | None = facts.get("batch_size")
    try:
        found = list(islice(_lengths(batch), 4))
    except Exception:
        # A batch of the user's own class: what it refuses is not the loop's concern.
        found = []
    if size is None:
        # Parts of different lengths are those of one sample.
        return found[0] or 0 if len(set(found)) == 1 else 0
    first = next((length for length in found if length is not None), None)
    # A sample's own first axis is not the batch's.
    return first if first is not None and first <= size else size


def first_length(batch: Any) -> int | None:
    """The length of the first array of a batch."""
    return next((length for length in _lengths(batch) if length is not None), None)


def _lengths(batch: Any, depth: int = 4) -> Iterator[int | None]:
    """Lengths of the arrays of a batch; None for what has none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        yield int(shape[0]) if len(shape) else None
    elif depth and (isinstance(batch, dict) or hasattr(batch, "keys")):
        for part in batch.values():
            yield from _lengths(part, depth - 1)
    elif depth and isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], (str, bytes, int, float)):
        for part in batch:
            yield from _lengths(part, depth - 1)
    else:
        yield len(batch) if isinstance(batch, (tuple, list)) else None


def _children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def _workers(iterator: Any, before: set[int]) -> list[tuple[int, int]]:
    """Process ids and numbers of the worker processes of an iterator."""
    processes = getattr(iterator, "_workers", None)
    if isinstance(processes, list) and all(hasattr(process, "pid") for process in processes):
        return [(process.pid, number) for number, process in enumerate(processes)]
    return [(pid, number) for number, pid in enumerate(sorted(_children() - before))]


def facts(loader: Any) -> dict[str, Any]:
    """The settings of a loader, as far as they are known."""
    name = type(loader).__name__
    known: dict[str, Any] = {"name": name, "kind": _kind(loader), "gpu": _gpu_in_use(), **_threads_or_workers(loader)}
    inner = _dataloader(loader)
    asked = vars_of(inner).get("_IterableDataset_len_called")
    try:
        known["batches"] = len(loader)
    except Exception:
        # No length: streams, generators; loaders whose length is not known before their first pass.
        pass
    if inner is not None:
        # A DataLoader over a stream that was asked for its length warns of more samples.
        inner._IterableDataset_len_called = asked
        known |= {
            "kind": "torch",
            "workers": inner.num_workers,
            "prefetch_factor": inner.prefetch_factor,
            "persistent_workers": inner.persistent_workers,
            "pin_memory": inner.pin_memory,
            "in_order": getattr(inner, "in_order", None),
            "batch_size": inner.batch_size or getattr(inner.batch_sampler, "batch_size", None),
        }
        if not isinstance(known["batch_size"], int):
            known["batch_size"] = None
    return known


def _dataloader(loader: Any) -> Any:
    """The DataLoader in a loader, or None."""
    data = sys.modules.get("torch.utils.data")
    for _ in range(5):
        if data is None or loader is None:
            return None
        if isinstance(loader, data.DataLoader):
            return loader
        inner = next((value for name in WRAPPED if (value := vars_of(loader).get(name)) is not None), None)
        loader = inner[0] if isinstance(inner, list) and inner else inner
    return None


def vars_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object itself: `getattr` may run code of the loader."""
    return getattr(thing, "__dict__", {})


def _kind(loader: Any) -> str:
    modules = {cls.__module__.split(".")[0] for cls in type(loader).__mro__}
    if "nvidia" in modules:
        return "dali"
    if "tensorflow" in modules:
        return "tf_data"
    # `worker_count` is a setting of Grain's DataLoader alone, not of its data sets.
    return "grain" if "grain" in modules and type(loader).__name__ == "DataLoader" else "other"


def _threads_or_workers(loader: Any) -> dict[str, Any]:
    """The number of workers of Grain's DataLoader, or of threads of DALI's pipeline, where there is one."""
    attributes = vars_of(loader)
    pipelines = attributes.get("_pipes")
    pipeline = pipelines[0] if isinstance(pipelines, list) and pipelines else None
    options = attributes.get("_multiprocessing_options")
    count = getattr(pipeline, "num_threads", None) if options is None else getattr(options, "num_workers", None)
    return {"workers": count} if isinstance(count, int) else {}


def _gpu_in_use() -> bool:
    # Not `is_available`, which may start the driver, and processes forked later could not use it.
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
