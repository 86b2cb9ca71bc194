"""The loader of Python: the native one, as an iterable with the protocols that training frameworks ask for.

    for batch in loader        the next epoch, opened at its first batch
    loader.epoch(n)            the epoch n, opened now
    loader.state_dict()        plain types, for any checkpoint; load_state_dict() goes on after the last batch received
"""

from __future__ import annotations

import html
import json
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, Iterator, Literal, Sequence, TypedDict, TypeVar

from ._native import Loader as _Native
from ._tensors import Batch

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    Path = str | os.PathLike[str]

Out = TypeVar("Out")
"""What a batch is handed out as."""


class Settings(TypedDict, total=False):
    """Settings of every loader, beside those of its source."""

    output: Literal["auto", "dict"]
    """feedline.torch: "dict" hands out every batch as a dict from name to tensor."""
    batch_size: int
    """Rows of a batch of this rank; 32 by default."""
    global_batch: int
    """Rows of a batch of all ranks together, in place of `batch_size`."""
    shuffle: int | bool | None
    """The seed of the order, and of the pictures' augmentation. True is 0. None or False: in order, as for validation."""
    window: int
    """Shuffles within so many chunks at a time (row groups, compressed shards). By default over all samples."""
    lanes: int
    """So many sequences side by side, for shuffled chunks and many ranks."""
    shard: Literal["env"] | tuple[int, int] | None
    """"env": rank and world from torchrun, Slurm, MPI or Kubernetes. (rank, world): these. None: the only process."""
    last_batch: Literal["keep", "mask", "pad", "drop"]
    """What becomes of samples that fill no batch. "keep": a smaller batch, the default."""
    ids: bool
    """Also hands out `ids` and `status`, one per row; they lie on the host."""
    keep: Sequence[str]
    """The fields to hand out; all by default."""
    workers: int
    """Decode threads; one per core by default."""
    slots: int
    """Batches in host memory at once, yours included."""
    memory_budget: int
    """Most bytes of host memory."""
    reader: Literal["auto", "uring", "pread", "mmap"]
    """How files are read."""
    direct: Literal["auto", "on", "off"]
    """Whether reads bypass the page cache."""
    depth: int
    """Most reads in flight."""
    cache: Path
    """A folder on a local disk that keeps objects, and files of network mounts."""
    cache_bytes: int
    """Most bytes of that folder."""
    checked: Path
    """A file of checksums for every read; it is made if it is missing."""
    seek_points: Path
    """JPEGs: a file of seek points, from which decoding starts at the crop; it is made if it is missing."""
    in_memory: bool
    """Reads all files into memory first."""
    substitute: int
    """Other samples stand in for those that cannot be had, for so many distinct ones at most. None: the first is an error."""
    ledger: Path
    """With `substitute`: a file that gets a line of JSON for each sample that could not be had."""
    held_deadline: float
    """Seconds that a wait lasts while you hold every batch; 10 by default."""
    stall_deadline: float
    """Seconds that one read, decode or copy may take; 300 by default."""
    stop_on_signals: bool
    """Ends the loop after a whole batch when SIGTERM or the like arrives, see `stop_requested`."""
    device: Any
    """"auto" (a GPU where one is usable), "cpu", "cuda" (of several GPUs, that of the local rank), "cuda:N", a torch.device."""
    device_batches: int
    """GPU: batches in its memory at once, yours included; 3 by default."""
    streams: Sequence[Any]
    """GPU: streams that work on every batch beside the one that takes it, see `Batch.bind`."""
    gds: Literal["auto", "require", "off"]
    """GPUDirect Storage."""
    numa: Literal["auto", "off"] | int
    """Placement of threads and memory."""


class Pictures(TypedDict, total=False):
    """Settings of sources that have pictures."""

    size: int
    """Pixels of a side."""
    augment: bool
    """A random part and flip, or the middle. By default the first with `shuffle`."""
    dtype: Any
    """"f32", "f16" or "bf16" (or a dtype of torch or NumPy): 0 to 1 before `normalize`. None: bytes."""
    normalize: tuple[Sequence[float], Sequence[float]] | None
    """Floats: (mean, std), each a number per channel or one for all; see `feedline.IMAGENET`."""
    layout: Literal["nhwc", "nchw"]
    """Order of dimensions. By default that of the library."""
    dct_scaling: bool
    """JPEGs: decodes at 1/2, 1/4 or 1/8 of the size if the part is that much larger; faster, with other rounding."""
    strict: bool
    """JPEGs: False takes what can be decoded of damaged ones."""


class Source(Settings, Pictures, total=False):
    """Settings of a source that may have pictures."""


class Epoch(Generic[Out]):
    """The batches of an epoch, in order; an iterator. A wait leaves the GIL to others, and hears Ctrl-C."""

    def __init__(self, loader: Loader[Out], number: int | None = None):
        self._loader = loader
        self._superseded = False
        self._native = None if number is None else loader._open(self, number)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Out:
        native = self._opened()
        try:
            batch = next(native)
        except StopIteration:
            self._loader._ended(self)
            raise
        return self._loader._out(batch)

    def __len__(self) -> int:
        """Batches that are still to come."""
        return len(self._opened())

    def _opened(self) -> Any:
        if self._native is None:
            with self._loader._opening:
                if self._native is None:
                    self._native = self._loader._open(self, None)
        if self._superseded:
            # Its end would look like that of a whole epoch.
            raise RuntimeError("this epoch was ended by a newer loop over its loader, or by load_state_dict: one can be open")
        return self._native

    def close(self) -> None:
        """Ends it, so that the next epoch can start. Batches that were handed out stay."""
        if self._native is not None:
            self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class Loader(_Native, Generic[Out]):
    """Reads a dataset and hands out batches: the same ones for the same seed, with any number of workers.

    `for batch in loader` is the next epoch each time. A loop that breaks leaves its epoch; the next loop is the epoch after it.
    """

    _layout = "nhwc"
    _next: int | None
    _live: weakref.ref[Epoch[Out]] | None
    _loaded: bool
    _opening: threading.Lock

    def __new__(cls, source: str, path: Path, **settings: Any) -> Self:
        shuffle = settings.pop("shuffle", None)
        if shuffle is not None and shuffle is not False:
            settings["shuffle"] = 0 if shuffle is True else shuffle
        if settings.get("size") is not None:
            settings.setdefault("layout", cls._layout)
        if (dtype := settings.get("dtype")) is not None:
            settings["dtype"] = _dtype(dtype)
        loader = super().__new__(cls, source, os.fspath(path), **settings)
        # The epoch of the next loop, if it is not the one of the next batch.
        loader._next = None
        loader._live = None
        # A state was loaded, and no epoch was opened since.
        loader._loaded = False
        loader._opening = threading.Lock()
        return loader

    def __init__(self, *_args: object, **_settings: object):
        # `__new__` took them.
        pass

    def _out(self, batch: Batch) -> Any:
        return batch

    # Iteration

    def __iter__(self) -> Iterator[Out]:
        return Epoch(self)

    def epoch(self, epoch: int | None = None) -> Epoch[Out]:
        """The batches of an epoch, by default of the next one. Only one may be open at a time."""
        return Epoch(self, self._upcoming() if epoch is None else epoch)

    def _upcoming(self) -> int:
        return self.next_epoch if self._next is None else self._next

    def _open(self, epoch: Epoch[Out], number: int | None) -> Any:
        if number is None:
            # A loop that was left by an exception may live on in its traceback.
            self._supersede()
            number = self._upcoming()
            if self._loaded and number != self.next_epoch:
                self.resume(self.state(), number)
        native = super().epoch(number)
        self._next, self._live, self._loaded = number + 1, weakref.ref(epoch), False
        return native

    def set_epoch(self, epoch: int) -> None:
        """The next loop is this epoch: what is left of it if the loaded state is in it, else all of it."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch}: epochs are counted from 0")
        self._next = epoch

    @property
    def sampler(self) -> Sampler:
        """For frameworks that call `loader.sampler.set_epoch`."""
        return Sampler(self)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands after the last batch received: numbers and strings, under 1 KiB; the same on every rank."""
        return json.loads(self.state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict()`, with the same settings on any number of ranks and workers."""
        self._supersede()
        self.resume(json.dumps(state, separators=(",", ":")).encode())
        self._next, self._loaded = None, True

    # Measurements

    def snapshot(self) -> dict[str, Any]:
        """All measurements so far: nanoseconds, bytes and counts by stage, for a log."""
        return json.loads(self._snapshot())

    def what_if(
        self,
        *,
        workers: int | None = None,
        slots: int | None = None,
        depth: int | None = None,
        storage_factor: float | None = None,
        consumer_factor: float | None = None,
        cached: bool = False,
        local_cache: bool = False,
        gpu_decode: bool = False,
    ) -> dict[str, Any] | None:
        """Predicts samples per second (`items_per_s`) and the limit after a change; None before anything was measured.

        `storage_factor` and `consumer_factor` are multiples of the present speeds. `cached`: all files are in the page cache.
        """
        change = {"workers": workers, "slots": slots, "depth": depth, "storage_factor": storage_factor}
        change |= {"consumer_factor": consumer_factor, "cached": cached, "local_cache": local_cache}
        said = self._what_if(json.dumps({**change, "gpu_decode": gpu_decode}))
        return None if said is None else json.loads(said)

    def _repr_html_(self) -> str:
        """The report, for notebooks."""
        return f"<pre>{html.escape(self.report())}</pre>"

    def close(self) -> None:
        """Ends the open epoch, if there is one. The loader can go on."""
        live = self._live() if self._live is not None else None
        if live is not None:
            live.close()
        self._live = None

    def _ended(self, epoch: Epoch[Out]) -> None:
        if self._live is not None and self._live() is epoch:
            self._live = None

    def _supersede(self) -> None:
        live = self._live() if self._live is not None else None
        self.close()
        if live is not None:
            live._superseded = True

    def __reduce__(self) -> Any:
        raise TypeError("a loader has threads and is not pickled or copied: build it in the process that uses it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # Sources

    @classmethod
    def images(cls, path: Path, **settings: Unpack[Source]) -> Self:
        """A folder of pictures, with a folder per class or flat. Fields: `image`; with classes `label` (i64)."""
        return cls("images", path, **settings)

    @classmethod
    def records(cls, path: Path, *, record_bytes: int, **settings: Unpack[Settings]) -> Self:
        """Records of a fixed size in one file, a folder, or the files of a pattern. Field: `record` (u8)."""
        return cls("records", path, record_bytes=record_bytes, **settings)

    @classmethod
    def tokens(
        cls, path: Path, *, seq_len: int, token: str = "u16", next_token: bool = False, **settings: Unpack[Settings]
    ) -> Self:
        """Flat files of tokens (nanoGPT, llm.c), cut into windows of `seq_len`. Field: `tokens`.

        With `next_token` a window has one token more: the first `seq_len` are inputs, the last `seq_len` targets.
        """
        own = {"seq_len": seq_len, "token": token, "next_token": next_token or None}
        return cls("tokens", path, **own, **settings)

    @classmethod
    def megatron(
        cls,
        path: Path,
        *,
        seq_len: int | None = None,
        documents: int | None = None,
        next_token: bool = False,
        **settings: Unpack[Settings],
    ) -> Self:
        """Megatron's .idx and .bin: windows of `seq_len`, or whole documents of at most `documents` tokens."""
        own = {"seq_len": seq_len, "up_to": documents, "next_token": next_token or None}
        return cls("megatron", path, **own, **settings)

    @classmethod
    def webdataset(
        cls,
        path: Path,
        *,
        image: str | None = None,
        columns: Sequence[str] | None = None,
        index_file: Path | None = None,
        **settings: Unpack[Source],
    ) -> Self:
        """Tar shards, as in "train-{0000..0127}.tar". Without `image` ("jpg;png") and `columns` the first sample tells.

        Fields: `image`; `label` of the member "cls"; other members as bytes, padded, with their lengths in NAME.lens.
        """
        own = {"image": image, "columns": columns, "index_file": index_file}
        return cls("tar", path, **own, **settings)

    @classmethod
    def parquet(
        cls,
        path: Path,
        *,
        columns: Sequence[str] | None = None,
        image: str | None = None,
        stack: str | None = None,
        up_to: int | None = None,
        null_zero: bool | None = None,
        **settings: Unpack[Source],
    ) -> Self:
        """Parquet files. `stack` joins the columns into one field; `up_to` bounds lists; `null_zero`: nulls are 0 or empty."""
        own = {"columns": columns, "image": image, "stack": stack, "up_to": up_to, "null_zero": null_zero}
        return cls("parquet", path, **own, **settings)

    @classmethod
    def tfrecord(
        cls,
        path: Path,
        *,
        image: str | None = None,
        columns: Sequence[str] | None = None,
        index_file: Path | None = None,
        **settings: Unpack[Source],
    ) -> Self:
        """TFRecord files of tf.train.Example. Columns are numbers: "label" one integer, "boxes:f32:4" four floats."""
        own = {"image": image, "columns": columns, "index_file": index_file}
        return cls("tfrecord", path, **own, **settings)

    @classmethod
    def mds(cls, path: Path, *, columns: Sequence[str] | None = None, **settings: Unpack[Source]) -> Self:
        """Shards of MosaicML Streaming."""
        return cls("mds", path, columns=columns, **settings)

    @classmethod
    def npy(
        cls, path: Path, *, rows: bool = False, up_to: int | None = None, **settings: Unpack[Settings]
    ) -> Self:
        """NumPy arrays: a sample per file, or per row of the first axis. Field: `array`."""
        return cls("npy", path, rows=rows or None, up_to=up_to, **settings)

    @classmethod
    def npz(
        cls,
        path: Path,
        *,
        columns: Sequence[str] | None = None,
        rows: bool = False,
        up_to: int | None = None,
        **settings: Unpack[Settings],
    ) -> Self:
        """Archives of NumPy arrays. `up_to` bounds the lengths of `columns`."""
        return cls("npz", path, columns=columns, rows=rows or None, up_to=up_to, **settings)

    @classmethod
    def safetensors(
        cls, path: Path, *, columns: Sequence[str] | None = None, **settings: Unpack[Settings]
    ) -> Self:
        """safetensors files: a sample per row of their tensors."""
        return cls("safetensors", path, columns=columns, **settings)


class Sampler:
    """What frameworks ask of a loader's sampler. The order itself is the loader's."""

    def __init__(self, loader: Loader[Any]):
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of an epoch, of all ranks together."""
        return self._loader.samples_per_epoch


def _dtype(dtype: Any) -> str:
    """feedline's name of an element type of torch or NumPy."""
    name = getattr(dtype, "__name__", None) or str(dtype).rsplit(".", 1)[-1]
    return {"float32": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16", "float": "f32"}.get(name, name)
