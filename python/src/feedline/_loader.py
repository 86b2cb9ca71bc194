"""The loader of Python: the native one, as an iterable with the protocols that training frameworks ask for.

    for batch in loader        the next epoch, opened at its first batch
    loader.epoch(n)            the epoch n, opened now
    loader.state_dict()        plain types, for any checkpoint; load_state_dict() goes on after the last batch received
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Generic, Iterator, Literal, Mapping, Sequence, TypedDict, TypeVar

from . import _code, _html, _native, _ranks, _settings, _signals, _tables
from ._native import Loader as _Native
from ._tensors import Batch
from .errors import BatchesHeldError, ConfigError, EpochLiveError, FingerprintError, ForkedError, StateError

if TYPE_CHECKING:
    import numpy
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self, Unpack

    Path = str | os.PathLike[str]
    Paths = Path | Sequence[Path]
    Function = Callable[[bytes, int], Any]

Out = TypeVar("Out")
"""What a batch is handed out as."""


class Packed(TypedDict, total=False):
    """Rows of `tokens` tokens, with the fields `tokens` (as it is called), `positions`, `documents`, `cu_seqlens` and `max_seqlen`.

    Documents are packed where they lie: of megatron, tokens with `separator`, npy, safetensors, records. Others (parquet,
    webdataset, tfrecord, mds, data with `checked`) need `copy`, or lists of ids as Megatron's files, which `prepare documents` writes.

    subset, take and leave choose documents, before they are packed: each part has `bins` of its own, and they share a `copy`.

    Labels for models that shift them: torch.where(positions > 0, tokens.long(), -100). No target crosses a document. Attention stays
    within a document by `documents` (-1 in padding), or by `feedline.torch.cu_seqlens(batch)`."""

    tokens: int
    """Tokens of a row."""
    bins: Path | Sequence[Path]
    """The file of the plan; it is made if it is missing. In a mix: one for each path."""
    field: str | Sequence[str] | None
    """The field of the documents; by default the only one, or "tokens". A list: also fields with an element for each token, such as
    labels, which stand in the rows as the tokens do."""
    key: int | None
    """Packs documents in an order shuffled by this key, in place of their own."""
    longer: Literal["split", "cut", "concatenate"] | None
    """What becomes of documents that are longer than a row; None: an error. "concatenate" puts all documents one after the other in
    place of best fit: rows are full, unless `documents_max` ends them, and a document goes on in the next row, as a part with
    positions of its own."""
    documents_max: int | None
    """Most documents of a row; one for each 16 tokens by default, and at least 64."""
    padding: int | Mapping[str, int] | None
    """The token of the padding, of all fields or by field: {"labels": -100}; 0 by default."""
    rows: Path | Sequence[Path] | None
    """A file, in a mix one for each path, that keeps the rows, too, so that each is one read; it is made if it is missing, as large
    as the tokens. It has no checksums, and is not made anew if only the middle of the documents' files changes. A state of a run
    without it does not fit."""
    copy: Path | Sequence[Path] | None
    """A file, in a mix one for each path, to which the documents are copied first, once, as large as their tokens; it is made if it is
    missing. With `checked` they are verified then. A state of a run without it does not fit."""
    estimated: bool | None
    """With `tokenizer` and longer="cut": packs texts before they are tokenised, by their bytes and a look at 2,048 of them, so that
    the first step needs no pass. Rows have more padding, and tokens past the end of a row are cut. In its place `lengths_file` measures
    the lengths by one pass, and `copy` keeps the tokens."""


class Chat(TypedDict, total=False):
    """How conversations become texts."""

    template: str | None
    """The name of one of the folder's templates, or a file NAME.jinja. By default the folder's only one, or "default"."""
    variables: Mapping[str, Any] | None
    """Further variables of the template, as keyword arguments of `apply_chat_template`: {"enable_thinking": False}."""
    today: str | None
    """The day "2026-11-30" that templates with `strftime_now` print."""
    generation_prompt: bool | None
    """True: the text ends with the beginning of an answer, as by add_generation_prompt."""


class Settings(TypedDict, total=False):
    """Settings of every loader, beside those of its source. None is the default of each."""

    output: Literal["auto", "dict"] | None
    """feedline.torch: "dict" hands out every batch as a dict from name to tensor."""
    batch_size: int | None
    """Rows of a batch of this rank; 32 by default. With `sharding`: of a block of rows."""
    global_batch: int | None
    """Rows of a batch of all ranks together, in place of `batch_size`. With `sharding`: of the array, over all processes."""
    sharding: Any
    """feedline.jax: the jax.sharding.Sharding of the batches, which are arrays over its devices. Its first dimension cuts the rows
    into blocks, each a data rank; arrays of fewer dimensions get the first entries of its spec. `workers` and `memory_budget`
    count for all blocks of the process together, `slots`, `device_batches` and `substitute` for each.

    The rows are those of one device (with several `lanes`, in the order of their blocks), and so are states. `last_batch` is as on
    several ranks. `ragged` cannot be, nor fields whose rows differ in shape between blocks."""
    integers: Literal["i32"] | None
    """"i32": integers of 64 bits, such as labels and tokens, come with 32, and u64 as u32. One that does not fit is an error that
    names its sample. The default of feedline.jax, unless jax_enable_x64 is set."""
    shuffle: int | bool | None
    """The seed of the order, and of the pictures' augmentation. True is 0. None or False: in order, as for validation."""
    seed: int | None
    """The seed of augmentation and of `map_batch`; by default that of `shuffle`."""
    indices: Sequence[int] | None
    """The samples of each epoch, in this order, or shuffled by `shuffle`. Ids may repeat. Or a mask: True or False for each sample.
    Not for `packed`: see `subset`."""
    sample_weights: Sequence[float] | None
    """A weight for each sample: an epoch draws samples by them, with `shuffle` as seed. Ranks share the draws, and a run resumes exactly.

    `loader.set_sample_weights(w)` sets others between two epochs. In place of torch's WeightedRandomSampler."""
    weights_of: str | None
    """In place of `sample_weights`: the field with the class of each sample, such as "label". Every class is drawn equally often."""
    draws: int | None
    """The number of draws of an epoch, of all ranks together; by default the number of samples."""
    replacement: bool | None
    """False: `sample_weights` draw each sample at most once in an epoch."""
    weights: Sequence[float] | None
    """Of several paths, mixes the data by these weights, with `shuffle` as seed. Without weights one follows the other."""
    schedule: Sequence[tuple[int, Sequence[float]]] | None
    """In place of `weights`: from each position of the run on, these. `[(0, [0.9, 0.1]), (50_000, [0.5, 0.5])]`; `ramp` makes one.

    A position counts the samples of all ranks since epoch 0. A resumed run keeps what had begun, and may have another
    future and more paths behind the others, with `epoch_len` as it was; weight 0 leaves a path out."""
    epoch_len: int | None
    """Of a mix, the samples of an epoch, of all ranks together. By default as many as all paths have."""
    subset: Sequence[int] | None
    """Only these samples; with `packed` these documents. Or a mask: True or False for each."""
    take: tuple[float, int] | None
    """(fraction, key): only about this fraction of the samples, which the key chooses."""
    leave: tuple[float, int] | None
    """(fraction, key): all samples but those that `take` chooses."""
    window: int | None
    """Shuffles within so many chunks at a time: row groups, compressed shards, or runs of some 32 MiB. By default over all samples."""
    lanes: int | None
    """So many sequences side by side, for shuffled chunks and many ranks."""
    lengths: Sequence[int] | None
    """A number known of each sample, such as `loader.lengths("tokens")`: all samples of a batch are between two `bounds`, on all ranks the same.

    What is left of a group goes into the next larger one, so the last batch of the epoch alone may be short. In `buckets` that of
    each is, anywhere in the epoch: metrics need `last_batch="mask"` and the status."""
    bounds: Sequence[int] | int | None
    """The largest length of each group of `lengths`, or how many groups there shall be, with the least padding; 64 by default."""
    budget: int | None
    """In place of `batch_size`: as many rows as fit, each counted with its group's bound, over all ranks."""
    multiple_of: int | None
    """The rows of a `budget` are a multiple of this: of the largest world size. By default of the world, so that all ranks have
    equally many; a run that goes on with another world needs it."""
    trim: Sequence[str] | None
    """Fields of varying length, of which `lengths` counts the elements: a batch has them up to its group's bound only."""
    shard: Literal["env"] | tuple[int, int] | DeviceMesh | ProcessGroup | None
    """"env", the default: rank and world of torch.distributed where it is initialised (feedline.jax: of a jax with several
    processes), else of the launcher: torchrun, Slurm, MPI, Kubernetes and others. (rank, world): these. None: all data.

    Where processes share data (tensor, context or pipeline parallelism): the axis of the data, as in shard=mesh["dp"], a
    DeviceMesh of one dimension; or the process group of the data-parallel ranks. "env" is an error where the process has a mesh
    with other axes.

    They are asked for when a length, state or batch is. If they change after that, the next use is an error."""
    last_batch: Literal["keep", "mask", "pad", "drop"] | None
    """What becomes of samples that fill no batch.

    "keep": a smaller batch; the default on one rank. "pad": samples from the beginning of the epoch fill it up; the default on
    several ranks, as with PyTorch's DistributedSampler. "drop": they are left out. "mask": rows of zeros fill it up, which `ids`
    must mark; for exact evaluation on many ranks. `loader.log()` and the report have the numbers of repeated and left-out samples."""
    last_batch_share: float | None
    """In `buckets`, where each has a last batch: the share of an epoch's samples that these may repeat or leave out; 0.01 by default.

    The one last batch of any other order is never too much."""
    ids: bool | None
    """Also hands out `ids` and `status`, one per row; they lie on the host."""
    keep: Sequence[str] | None
    """The fields to hand out; all by default."""
    ragged: Sequence[str] | Mapping[str, int | None] | None
    """Fields of varying length whose rows lie side by side, without padding: row i has the values offsets[i] to offsets[i + 1] of
    `name + ".offsets"`; see `feedline.torch.nested`. With a dict, the most bytes of each in a batch, where lengths are known."""
    map_batch: Callable[[_code.BatchArrays], None] | None
    """Changes each batch in place, on the host, in a thread of its own: a function of a dict of arrays (of PyTorch in
    feedline.torch, else of NumPy). It holds the GIL, once per batch. Pictures are bytes there; `dtype` acts behind it."""
    adds: Mapping[str, tuple[Any, Sequence[int]]] | None
    """Fields that `map_batch` writes: name to (element type, shape of a row)."""
    workers: int | None
    """Decode threads; by default one per core, which the ranks of a machine divide. Fewer where the system refuses threads."""
    slots: int | None
    """Batches in host memory at once, yours included."""
    memory_budget: int | None
    """Most bytes of host memory."""
    reader: Literal["auto", "uring", "pread", "mmap"] | None
    """How files are read."""
    direct: Literal["auto", "on", "off"] | None
    """Whether reads bypass the page cache."""
    depth: int | None
    """Most reads in flight."""
    cache: Path | None
    """A folder on a local disk that keeps objects, and files of network mounts."""
    cache_bytes: int | None
    """Most bytes of that folder."""
    lengths_file: Path | None
    """A file of the lengths that the index lacks, for `loader.lengths`; it is made, by reading everything once, if it is missing."""
    checked: Path | None
    """A file of checksums for every read; it is made if it is missing."""
    seek_points: Path | None
    """JPEGs: a file of seek points, from which decoding starts at the crop; it is made if it is missing. It may be the file of
    `checked`, and one pass then finds both."""
    packed: Packed | None
    """Puts whole documents into rows of one length, by best fit."""
    in_memory: bool | None
    """Reads all files into memory first; the ranks of a machine share one copy."""
    substitute: int | None
    """Other samples stand in for those that cannot be had, for so many distinct ones at most. None: the first is an error."""
    ledger: Path | None
    """With `substitute`: a file that gets a line of JSON for each sample that could not be had."""
    held_deadline: float | None
    """Seconds that a wait lasts while you hold every batch; 10 by default."""
    stall_deadline: float | None
    """Seconds that one read, decode or copy may take; 300 by default."""
    stop_on_signals: bool | None
    """SIGTERM and SIGUSR1 set `stop_requested`. On one rank the loop ends after a whole batch, and each later one before its
    first; on several each rank goes on, since they hear signals at different steps: leave where all of them say so.

    For loaders that the main thread builds, also while it does. An earlier handler of Python is called, too; a later one takes
    the place of this. All is as it was when the last such loader is gone, and in forked children."""
    device: Any
    """"auto" (a GPU where one is usable), "cpu", "cuda" (of several GPUs, that of the local rank), "cuda:N" or N, a torch.device."""
    device_batches: int | None
    """GPU: batches in its memory at once, yours included; 3 by default."""
    streams: Sequence[Any] | None
    """GPU: streams that work on every batch beside the one that takes it, see `Batch.bind`."""
    gds: Literal["auto", "require", "off"] | None
    """GPUDirect Storage."""
    numa: Literal["auto", "off"] | int | None
    """Placement of threads and memory."""


class Pictures(TypedDict, total=False):
    """Settings of sources that have pictures."""

    size: int | tuple[int, int] | None
    """Pixels of a side of a square part; or (height, width), to which the whole picture is scaled."""
    patches: tuple[int, int] | None
    """Instead of `size`: (pixels of a side, most patches). The whole picture at its own size, or smaller, as a row of patches.

    The fields `image` (patches, row by row), `image.positions` (row, column), `image.grid` (rows, columns) and `image.size`
    (height, width of the picture); the sums of `image.lens` are the `cu_seqlens` of a batch."""
    enlarge: bool | None
    """Patches: True enlarges small pictures, as SigLIP2 NaFlex."""
    merge: tuple[int, int] | None
    """Patches: (patches of a side, least patches), for models that merge them: sizes and order of Qwen2-VL, and with
    filter="bicubic" its pixels."""
    buckets: Sequence[tuple[int, int]] | None
    """In place of `size`: each picture is scaled and cut to that (height, width) whose ratio is nearest, and a batch has one size.

    Field `image.geometry`: height and width of the picture, top and left of the part, height and width of the bucket."""
    sizes: Sequence[tuple[int, int]] | None
    """(height, width) of every sample, of those that `subset` and the like leave: `loader.picture_sizes(file)` gives them. For `buckets`,
    where `budget` counts pixels, and for `patches`, which it then groups by number, as by `lengths`: `budget` counts patches."""
    augment: bool | None
    """A random part and flip, or the middle. By default the first with `shuffle`. Patches: a random flip; by default none."""
    filter: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None
    """How pictures are scaled; "bilinear" by default."""
    dtype: Any
    """"f32", "f16" or "bf16" (or a dtype of torch or NumPy): 0 to 1 before `normalize`. None: bytes."""
    normalize: tuple[float | Sequence[float], float | Sequence[float]] | None
    """Floats: (mean, std), each a number per channel or one for all; see `feedline.IMAGENET`."""
    layout: Literal["nhwc", "nchw"] | None
    """Order of dimensions. By default that of the library."""
    dct_scaling: bool | None
    """JPEGs: decodes at 1/2, 1/4 or 1/8 of the size if the part is that much larger; faster, with other rounding."""
    strict: bool | None
    """JPEGs: False decodes the readable part of damaged ones."""
    max_pixels: int | None
    """The largest picture; 67,108,864 by default. A worker may take 16 bytes of memory for each pixel."""
    exif_orientation: bool | None
    """JPEGs: True turns them upright by their EXIF data, not by XMP; by default they are as stored."""


class Source(Settings, Pictures, total=False):
    """Settings of a source that may have pictures."""

    decoders: Mapping[str, tuple[Function, Any, int | Sequence[int]]] | None
    """Python functions for fields of bytes: name to (function, element type, shape of a row or its most elements).

    Called as function(bytes, seed) for each sample, with the GIL: the last resort."""
    join: Path | Sequence[Path] | None
    """`images` and `webdataset`: labels, captions or latents kept apart, joined by name. A .csv, .tsv or .parquet, which is read whole into
    memory, or a second set of .tar shards with the same keys; a list is joined one after the other. Its columns become fields: of a
    csv i64, f64 or bytes, by what all cells are. Names may be paths in the folder, or file names, with or without their ending."""
    key: str | None
    """The column of a joined table that has the names; "file_name" by default."""
    missing: Literal["error", "skip"] | None
    """Samples without a row and rows without a sample: "error" counts and names them, the default; "skip" leaves them out, and the
    report counts and names them."""
    join_columns: Sequence[str] | None
    """The columns of the joined table, by default all; of joined shards the endings, as `columns` of `webdataset`."""


class Texts(Source, total=False):
    """Settings of a source with columns of texts."""

    tokenizer: Path | None
    """Tokenizes texts while they are loaded: a tokenizer.json, or the folder of a model. The batch has `input_ids` (int32), padded by
    zeros, with their numbers in input_ids.lens. Ids are those of `tokenizers` and `transformers`."""
    max_length: int | None
    """With `tokenizer`: the most tokens of a row."""
    truncation: Literal["right", "left"] | None
    """The side from which a longer text loses tokens. None: it is an error of its sample."""
    special_tokens: bool | None
    """False leaves out the special tokens around each text."""
    texts: Sequence[str] | None
    """The columns of texts, if there are several: ["chosen", "rejected"] gives chosen_input_ids and rejected_input_ids."""
    text_max: int | None
    """The most bytes of a text; 2 MiB by default. Each worker may need 256 times as much memory: a smaller budget allows less."""
    chat: bool | str | Chat | None
    """Rows are conversations in JSON: messages, or an object with `messages`, and perhaps `tools`, `documents` and
    `chat_template_kwargs`. True: by the chat template of the folder; a name or NAME.jinja: by this one. If it has
    {% generation %}, the batch has `loss` (uint8), too: 1 for tokens of the assistant."""


class Columns(Texts, total=False):
    """Settings of Delta and Iceberg tables: those of `Loader.parquet`."""

    columns: Sequence[str] | None
    image: str | Sequence[str] | None
    elements: int | Mapping[str, int] | None
    stack: str | None
    up_to: int | Mapping[str, int] | None
    null_zero: bool | None


class _Nothing:
    """What is left of an epoch that a loaded state has behind it."""

    def __next__(self) -> Any:
        raise StopIteration

    def __len__(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Epoch(Generic[Out]):
    """The batches of an epoch, in order; an iterator. A wait leaves the GIL to others, and hears Ctrl-C."""

    end_of_dataloader = False
    """Whether the last batch was handed out, for Accelerate."""
    remainder = -1
    """Samples in the last batch of all ranks together if they do not fill it, else 0; for Accelerate."""

    def __init__(self, loader: Loader[Out], number: int | None = None):
        self._loader = loader
        self._ended_by = ""
        self._left, self._number = 0, -1
        self._native = None if number is None else loader._open(self, number)

    def __iter__(self) -> Self:
        self._loader._check_fork()
        return self

    def __next__(self) -> Out:
        native = self._native
        if native is None or self._ended_by:
            if self._loader._stopped:
                raise StopIteration
            native = self._opened()
        try:
            batch = next(native)
        except StopIteration:
            self._check()
            self._loader._ended(self)
            raise
        except KeyboardInterrupt:
            raise
        except BatchesHeldError as error:
            error.args = (f"{error}{_kept(error.held, self._loader._copies)}",)
            raise
        except Exception as error:
            if len(native) == 0:
                self._ended_by = (
                    f"an error ({error}): after `load_state_dict(state_dict())` a new loop goes on behind the last batch; with "
                    "`substitute` others stand in for bad samples"
                )
                self._loader._leave(self)
            raise
        self._loader._received = native._received
        # One loop may run in several threads.
        with self._loader._opening:
            self._left -= 1
            last = self._left == 0
        if last:
            self._loader._last_is_out(self)
        return self._loader._out(batch)

    def __len__(self) -> int:
        """Batches that are still to come."""
        return len(self._opened())

    def _opened(self) -> Any:
        self._loader._check_fork()
        if self._native is None:
            with self._loader._opening:
                if self._native is None:
                    self._native = self._loader._open(self, None)
        self._check()
        return self._native

    def _check(self) -> None:
        if self._ended_by:
            # Its end would look like that of a whole epoch.
            raise RuntimeError(f"this epoch was ended by {self._ended_by}")

    def close(self) -> None:
        """Ends it, so that the next epoch can start. Batches that were handed out stay."""
        self._loader._check_fork()
        if self._native is not None:
            self._native.close()
        self._loader._leave(self)

    def __enter__(self) -> Self:
        self._loader._check_fork()
        return self

    def __exit__(self, *_error: object) -> None:
        # In a forked child nothing is open, and what ends the block, such as `sys.exit`, must get through.
        with contextlib.suppress(ForkedError):
            self.close()


def _kept(held: dict[str, int], copies: str) -> str:
    """What keeps batches, and what to do."""
    words = ""
    if held:
        counts = ", ".join(f"{name!r} of {count}" for name, count in held.items())
        words = f". Alive, also by views: {counts}. Keep {copies} in their place"
    # Of a cell of a notebook, or a line of an interpreter.
    failed = [f"sys.{name}" for name in ("last_value", "last_exc") if getattr(sys, name, None) is not None]
    if failed:
        words += f". {' and '.join(failed)} may keep the variables of what failed: set to None"
    return words


class Sampler:
    """What frameworks ask of a loader's sampler. The order itself is the loader's."""

    def __init__(self, loader: Loader[Any]):
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        """The ids of the next epoch, in the order of all ranks together."""
        return iter(self._loader._preview(self._loader._upcoming(), len(self)))

    def __len__(self) -> int:
        """Samples of an epoch, of all ranks together."""
        return self._loader.samples_per_epoch


#: What to do instead of a wrapper that reads samples, or deals them out to ranks.
_AS_IT_IS = "loop over the loader as it is, without DataLoader(...) or another wrapper: each rank has its part, on its device"


class _Item(list[int]):
    """Of `Batches`, for `Samples`."""


class Batches:
    """A loader as a `batch_sampler`: an item is the number of a batch in its epoch, in a list.

    With `Samples` it makes a DataLoader of the loader's batches, as Accelerate's `skip_first_batches` does.
    """

    def __init__(self, loader: Loader[Any]):
        self._loader = loader
        self.sampler, self.batch_size, self.drop_last = loader.sampler, loader.batch_size, loader.drop_last

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)

    even_batches = True
    """For Accelerate: all ranks have equally many."""

    def __iter__(self) -> Iterator[list[int]]:
        began = False
        for number in range(len(self)):
            item = self._loader._offered = _Item([number])
            yield item
            took = self._loader._offered is not item
            # A wrapper that passes over batches deals them out to ranks, which have their parts already.
            if began and not took:
                raise TypeError(f"batch {number} was passed over: {_AS_IT_IS}")
            began |= took
        self._loader._offered = None
        self._loader._fetched_all()

    def __len__(self) -> int:
        return len(self._loader)


class Samples:
    """What frameworks ask of a loader's dataset. Samples are read by whole batches."""

    def __init__(self, loader: Loader[Any]):
        self._loader = loader

    def __len__(self) -> int:
        """Samples of an epoch, of all ranks together."""
        return self._loader.samples_per_epoch

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """The batch of an item of `Batches`, in a list."""
        offered, self._loader._offered = self._loader._offered, None
        if offered is None or numbers is not offered:
            self[0]
        return [self._loader._fetch(numbers[0])]

    def __getitem__(self, index: int) -> Any:
        raise TypeError(f"feedline reads whole batches: {_AS_IT_IS}, or set indices=[...] to choose samples")


def _seconds(name: str, value: float) -> float:
    try:
        seconds = float("" if isinstance(value := _settings.plain(value), bool) else value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r}: give a number of seconds") from None
    # At most what a duration of the standard library of Rust holds.
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{name}={value!r}: give seconds from 0 to 1e9")
    return seconds


def estimate(loader: Loader[Any], step_s: float, seconds: float = 3.0) -> dict[str, Any]:
    """Before a run: takes batches of the loader's next epoch for up to `seconds`, without a step, and estimates the run.

    Epochs that are over within a second are repeated. `step_s` is the time of a training step. Build a loader for this: its batches count as handed out.

    `items_per_s` of this rank and `bound_by`, the limit; `loader_ns`, the time of a batch of the loader alone, and `step_ns`;
    `first_batch_ns`; `epoch`: its `samples`, `batches`, `ns`, `bytes` read and `requests` to stores; `cached`: the rate once all is
    cached; `memory_bytes`; `workers_until_storage` and `ranks_until_storage`: how many until storage limits. `text` has all of it
    in a table, with the source of each number.

        print(feedline.estimate(fl.images("train/", size=224, batch_size=256), step_s=0.12)["text"])
    """
    began, seconds, step_s = None, _seconds("seconds", seconds), _seconds("step_s", step_s)
    while True:
        with loader.epoch() as batches:
            for _ in batches:
                began = began or time.monotonic()
                if time.monotonic() - began >= seconds:
                    return loader.estimate(step_s)
        # A whole epoch is enough, unless it is over at once: a second one may find in memory what the first one read.
        if began is None or loader._stopped or time.monotonic() - began >= min(seconds, 1.0):
            return loader.estimate(step_s)


#: The entry of a state that names the version of a table; the rest of a state is the loader's.
_VERSION = "snapshot"


def _state(state: Mapping[str, Any]) -> bytes:
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a dict, not {type(state).__name__}: give what `state_dict()` gave")
    try:
        # Some checkpoints give numbers back as arrays.
        return json.dumps(_settings.plain(state), separators=(",", ":")).encode()
    except TypeError:
        raise StateError("this dict is no state, which has numbers and strings: give what `state_dict()` gave") from None


def _moved(state: Mapping[str, Any], moved: bytes) -> dict[str, Any]:
    version = {_VERSION: state[_VERSION]} if _VERSION in state else {}
    return json.loads(moved) | version


def state_at(state: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """The state after `samples` more samples were trained, of all ranks together: for a trainer behind a loader that reads ahead.

    `state` is that in which the count begins. The count goes on in later epochs. Rows that fill up a batch, skipped batches and
    samples that `last_batch="drop"` leaves out do not count. Within a batch the rest of it comes first, and the batches behind it
    begin earlier. With `lengths` or `buckets` count batches, by `state_trained`.
    """
    return _moved(state, _native.state_at(_state(state), _settings.whole("samples", samples)))


def state_trained(state: Mapping[str, Any], epoch: int, batch: int) -> dict[str, Any]:
    """The state after one more batch was trained, in any order; `loader.received` has its numbers.

        frontier = loader.state_dict()                             # before the loop
        queue.put((batch, loader.received))                        # where batches are received
        frontier = feedline.state_trained(frontier, *received)     # when all ranks have trained it

    The frontier stands at the first batch that is not trained, and skips those behind it that are. A batch that was trained
    before is an error, and so are more ranges of early batches than 1 KiB holds.
    """
    return _moved(state, _native.state_trained(_state(state), _settings.epoch(epoch), _settings.whole("batch", batch)))


def ramp(start: int, end: int, before: Sequence[float], after: Sequence[float]) -> list[tuple[int, list[float]]]:
    """Segments of a linear ramp for `schedule`: at most 64 steps over the positions from `start` to `end`, then `after`."""
    positions = _settings.whole("start", start), _settings.whole("end", end)
    return _native.ramp(*positions, _settings.numbers("before", before), _settings.numbers("after", after))


if TYPE_CHECKING:
    _OnClass = classmethod
else:

    class _OnClass(classmethod):
        """A constructor on the class, and `Samples` on a loader: both are called `dataset`."""

        def __get__(self, loader, owner=None):
            return super().__get__(loader, owner) if loader is None else Samples(loader)


class Loader(_Native, Generic[Out]):
    """Reads a dataset and hands out batches: the same ones for the same seed, with any number of workers.

    `for batch in loader` is the next epoch each time. A loop that breaks leaves its epoch; the next loop is the epoch after it.
    """

    # What PyTorch's DataLoader has; the settings that it does not share are in `batch_size` and below.
    num_workers = 0
    """No processes: the setting `workers` is a number of threads."""
    prefetch_factor = worker_init_fn = generator = multiprocessing_context = None
    pin_memory = persistent_workers = False
    timeout = 0

    _layout = "nhwc"
    _copies = "a copy"
    """How to keep what is in a batch."""
    _array: ClassVar[Callable[[Any], Any]] = staticmethod(_code.numpy_array)
    # The epoch of the next loop, if it is not the one of the next batch.
    _next: int | None = None
    _live: weakref.ref[Epoch[Out]] | None = None
    # `_next` was set by `set_epoch`, so that it counts also against a place in the middle of an epoch.
    _chosen = False
    # A state was loaded, and no epoch from its place on was opened since.
    _loaded = False
    # The epoch whose last batch was handed out while its loop has not come to its end, now or in the loaded state.
    _behind: int | None = None
    _received: tuple[int, int] | None = None
    # The epoch that `Samples` reads, and the number of its next batch.
    _read: tuple[Epoch[Out], int] | None = None
    _opening: threading.Lock
    _shuffled: bool
    _is_env: bool
    drop_last: bool
    """Whether samples that fill no batch are left out."""
    _lanes: int
    _grouped: bool
    _fills_groups: bool
    _budgeted: bool
    _multiple: int | None
    # The version of the table that is read.
    _table: str | None = None
    # The item of `Batches` that is asked for.
    _offered: _Item | None = None

    def __new__(cls, source: str, path: Paths, **settings: Any) -> Self:
        # First: a mesh or a group is no list.
        settings["shard"] = _ranks.of(settings.get("shard", "env"))
        settings = _settings.values(settings)
        shuffle = settings.pop("shuffle", None)
        if shuffle is not None and shuffle is not False:
            settings["shuffle"] = 0 if shuffle is True else shuffle
        if (settings.get("size") or settings.get("buckets")) is not None and settings.get("layout") is None:
            settings["layout"] = cls._layout
        if (dtype := settings.get("dtype")) is not None:
            # Pictures are bytes as they are.
            settings["dtype"] = None if (name := _code.element(dtype)) == "u8" else name
        if (function := settings.get("map_batch")) is not None:
            settings["map_batch"] = _code.map_batch(function, cls._array)
        for name, convert in (("adds", _code.adds), ("decoders", _code.decoders)):
            if settings.get(name) is not None:
                settings[name] = convert(settings[name])
        ranks = cls._ranks() if settings["shard"] == "env" else None
        stops = settings.get("stop_on_signals") is True
        if stops:
            _signals.install()
        try:
            loader = super().__new__(cls, source, _settings.paths(path), ranks=ranks, **settings)
        except BaseException:
            if stops:
                _signals.release(0)
            raise
        loader._shuffled = settings.get("shuffle") is not None
        loader.drop_last = settings.get("last_batch") == "drop"
        if (table := settings.get("table")) is not None:
            loader._table = table["snapshot"]
        loader._lanes = settings.get("lanes") or 1
        loader._is_env = settings["shard"] == "env"
        loader._grouped = settings.get("lengths") is not None or settings.get("sizes") is not None
        loader._fills_groups = loader._grouped and settings.get("last_batch") in (None, "pad")
        # What the rows of each batch of all ranks are a multiple of, if a budget makes them.
        loader._multiple = settings.get("multiple_of") if settings.get("budget") is not None else None
        loader._budgeted = settings.get("budget") is not None
        loader._opening = threading.Lock()
        if stops:
            _signals.watch(loader)
        return loader

    def __init__(self, *_args: object, **_settings: object):
        # `__new__` took them.
        pass

    @classmethod
    def _free_device_memory(cls) -> bool:
        """Frees what the framework keeps of a GPU's memory; whether it may have."""
        return False

    @classmethod
    def _ranks(cls) -> tuple[int, int] | None:
        """Rank and world of torch.distributed, where the process has initialised it."""
        dist: Any = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return None

    @staticmethod
    def _check_ranks() -> None:
        _ranks.check()

    def _out(self, batch: Batch) -> Any:
        return batch

    def lengths(self, name: str) -> numpy.ndarray:
        """The length of a field of every sample, of those that `subset` and the like leave, by its index or its `lengths_file`: what a sampler can group by.

        Values of the first dimension, and bytes of what is encoded, as numbers of 64 bits.
        """
        import numpy

        return numpy.frombuffer(self._lengths(name), numpy.uint64)

    def set_sample_weights(self, weights: Sequence[float]) -> None:
        """Draws the samples of the next epochs by these weights: between two epochs, the same on every rank.

        For a loader made with `sample_weights` or `weights_of`. A checkpoint of an epoch resumes with the weights of that epoch.
        """
        self._reweight(_settings.numbers("weights", weights))

    def picture_sizes(self, file: Path, name: str = "image") -> numpy.ndarray:
        """Height and width of the picture of every sample, of those that `subset` and the like leave: `sizes` for `buckets` and `patches`.

        Read once, and kept in `file`. A picture with a damaged header has 1 × 1 pixels.
        """
        import numpy

        return numpy.frombuffer(self._picture_sizes(name, os.fspath(file)), "<u4").reshape(-1, 2)

    # Iteration

    def __iter__(self) -> Iterator[Out]:
        self._check_fork()
        return Epoch(self)

    def epoch(self, epoch: int | None = None) -> Epoch[Out]:
        """The batches of an epoch, by default of the next one. Only one may be open at a time.

        After `load_state_dict` the epoch of the state is what is left of it, and of an earlier one nothing is.
        """
        number = self._upcoming() if epoch is None else _settings.epoch(epoch)
        return Epoch(self, None if self._stopped else number)

    @property
    def next_epoch(self) -> int:
        """The epoch that `state_dict()` stands in: that of the batch that comes next, or the one that `set_epoch` chose.

        Behind the last batch of an epoch it is that epoch until its loop has ended or another one has begun.
        """
        self._check_fork()
        if self._is_chosen():
            return self._upcoming()
        return super().next_epoch if (end := self._end()) is None else end

    def _is_chosen(self) -> bool:
        """Whether `set_epoch` chose another place than the run has: a loaded place stays if it is behind the chosen epoch."""
        place = super().next_epoch
        if not self._chosen or self._next is None or self._next in (place, self._behind):
            return False
        return not (self._loaded and self._next < place)

    def _end(self) -> int | None:
        """The epoch at whose end the run stands, unless a later one was chosen."""
        end = self._behind
        return None if end is not None and self._chosen and self._next is not None and self._next > end else end

    def _upcoming(self) -> int:
        if self._next is not None:
            return self._next
        return super().next_epoch if self._behind is None or not self._loaded else self._behind

    def _open(self, epoch: Epoch[Out], number: int | None, batch: int | None = None) -> Any:
        """Opens an epoch, at its place or at this batch."""
        if number is None:
            # A loop that was left by an exception may live on in its traceback.
            self._supersede("a newer loop over its loader: one can be open")
            number = self._upcoming()
        if self._loaded:
            place = super().next_epoch
            if number < place:
                self._next, self._chosen, self._behind = None, False, None
                return _Nothing()
            if number > place:
                self.resume(self.state(number))
        if batch is not None:
            at = json.loads(self.state()) if self._loaded else {"epoch": -1, "batch": 0}
            same = at["epoch"] == number
            if same and batch < at["batch"]:
                raise RuntimeError(f"batch {batch} of epoch {number} is behind the loaded state, which is at batch {at['batch']}")
            self.resume(self.state(None, batch - at["batch"]) if same else self.state(number, batch))
        if self._live is None and self._is_env:
            # A mesh may be younger than the loader.
            _ranks.check()
        native = self._start(number)
        self._next, self._live, self._chosen, self._loaded = number + 1, weakref.ref(epoch), False, False
        self._behind, epoch._left, epoch._number = None, len(native), number
        self._began(epoch)
        return native

    def _start(self, number: int) -> Any:
        return super().epoch(number)

    def _began(self, epoch: Epoch[Out]) -> None:
        """An epoch was opened."""

    def _last_is_out(self, epoch: Epoch[Out]) -> None:
        """Its last batch is about to be handed out."""
        epoch.end_of_dataloader = True
        if self._live is not None and self._live() is epoch:
            self._behind = epoch._number

    def set_epoch(self, epoch: int) -> None:
        """The next loop is this epoch: its rest where the loaded state is in it, nothing where the state is past it, else all."""
        self._check_fork()
        epoch = _settings.epoch(epoch)
        if not self._stopped:
            self._next, self._chosen = epoch, True

    @property
    def _stopped(self) -> bool:
        return self.stop_requested and self.shard[1] == 1

    # What frameworks ask of a DataLoader

    @property
    def batch_size(self) -> int:
        """Rows of a full batch of this rank."""
        return self._batch_sizes[0]

    @property
    def sampler(self) -> Sampler:
        """For frameworks that call `loader.sampler.set_epoch`."""
        self._check_fork()
        return Sampler(self)

    @property
    def batch_sampler(self) -> Batches:
        """For frameworks that skip batches by it."""
        return Batches(self)

    @staticmethod
    def collate_fn(batches: list[Any]) -> Any:
        """The batch of `Samples`: it is whole."""
        return batches[0]

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"a loader is no dataset: {_AS_IT_IS}")

    def _uneven(self) -> str | None:
        """Why some ranks have more rows in a step than others."""
        world = self.shard[1]
        if self._budgeted:
            # By default it is the world.
            if (self._multiple or world) % world == 0:
                return None
            given, give = f"multiple_of={self._multiple}", f"a multiple of {world}"
        else:
            rows = self._batch_sizes[1]
            if rows % world == 0:
                return None
            given, give = f"batches of {rows} rows", f"global_batch={rows - rows % world} or {rows - rows % world + world}"
        return f"{given} on {world} ranks: some have a row more than others, and what gathers rows fails: give {give}"

    def _fetch(self, number: int) -> Any:
        """Batch `number` of the epoch that is read, or else of the next one."""
        if self._read is None or self._read[1] != number:
            epoch = Epoch(self)
            if self._loaded and self._next is None and self._behind is not None:
                # Nothing is left of the loaded epoch: batches are those of the next one.
                self._behind = None
            epoch._native = self._open(epoch, None, number)
        else:
            epoch = self._read[0]
        self._read = epoch, number + 1
        try:
            return next(epoch)
        except StopIteration:
            raise IndexError(f"there is no batch {number} in what is left of the epoch") from None

    def _fetched_all(self) -> None:
        if self._read is not None:
            epoch, self._read = self._read[0], None
            next(epoch, None)

    # State

    @property
    def received(self) -> tuple[int, int] | None:
        """Epoch and index of the batch that was handed out last, which `feedline.state_trained` takes."""
        self._check_fork()
        return self._received

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands after the last batch received: numbers and strings, under 1 KiB and the name of a table's version; the same on every rank.

        A loop that trains later than it receives keeps it with each batch, and saves that of the last trained one. Counts of what was
        trained: `feedline.state_at`, `feedline.state_trained`.

        Behind the last batch of an epoch, as long as its loop has not ended, it is the end of that epoch: a loop over the epoch
        with this state is empty.
        """
        if self._is_chosen():
            state = self.state(self._next)
        else:
            state = self.state() if (end := self._end()) is None else self.state(end, len(self))
        return json.loads(state) | ({} if self._table is None else {_VERSION: self._table})

    def load_state_dict(self, state: dict[str, Any], *, rebatched: bool = False) -> None:
        """Goes on from `state_dict()`, with the same settings on any number of ranks and workers.

        With `rebatched` the global batch and `last_batch` may differ: the samples stay in order, in other batches.
        """
        data = _state(state)
        state = json.loads(data)
        version = state.get(_VERSION)
        if version is not None and self._table not in (None, version):
            message = f"the state is of {version}, the loader reads {self._table}; open the one that the run began with"
            raise FingerprintError(f"{message}, or start a new run")
        try:
            self.resume(data, rebatched)
        except EpochLiveError:
            self._supersede("load_state_dict")
            self.resume(data, rebatched)
        self._next, self._chosen, self._loaded, self._read = None, False, True, None
        self._received = None
        self._behind = epoch if (epoch := state["epoch"]) < super().next_epoch else None

    def skip(self, batches: range, epoch: int | None = None) -> None:
        """Leaves out these batches of an epoch, by default of the next one: `loader.skip(range(100, 120))` after a loss spike.

        They are not read. Batches count from the beginning of the epoch, as `state_dict()["batch"]` does. Every rank makes the
        same call; states keep what is still to be left out. `len(loader)` stays that of a whole epoch; `len` of its iterator is
        exact.
        """
        if not isinstance(batches, range) or batches.step != 1:
            raise TypeError(f"batches={batches!r}: give a range, as in skip(range(100, 120))")
        if batches.start < 0 or batches.stop < 0:
            raise ConfigError(f"batches={batches!r}: batches count from 0, as in skip(range(100, 120))")
        if batches.stop >= 1 << 64:
            raise ConfigError(f"batches={batches!r}: an epoch has fewer than 2^64 batches")
        number = self._next if self._next is not None else super().next_epoch
        self._skip(number if epoch is None else _settings.epoch(epoch), batches.start, batches.stop)

    # Measurements

    def snapshot(self) -> dict[str, Any]:
        """All measurements so far: nanoseconds, bytes and counts by stage, for a log.

        Of a mix, `["consumer"]["sources"]` has for each path the samples `delivered` to all ranks, those `asked` by its weights,
        and the `passes` over it."""
        return json.loads(self._snapshot())

    def verdict(self) -> dict[str, Any]:
        """What limits the loader so far, for programs.

        `headline` in words, `cause` (such as `"storage"`, `"decode"`, `"not_starved"`) and `also`, a second one close to it or
        None, `starved_share`, `strength` (`"strong"`, `"fair"`, or `{"thin": {"why": ...}}`), and `stages`, each with `utilisation` and
        `ceiling_items_per_s`. `advice`, the most promising first: dicts of `remedy` (such as `"workers"`), `setting` and `value`
        where it is a setting of the loader, `prediction` (`items_per_s` and more) where there is one, and `text`. `evidence`:
        dicts of `measure`, `value`, `unit` and `text`. `version` goes up where a code gets another meaning.
        """
        headline, verdict = self._verdict()
        return {"headline": headline, **json.loads(verdict)}

    def estimate(self, step_s: float) -> dict[str, Any]:
        """The rate and the limit of a run whose step takes `step_s` seconds, from the batches so far, taken without a step.

        `feedline.estimate` takes them. `text` is a table with the source of each number; see there.
        """
        if (said := self._estimate(_seconds("step_s", step_s))) is None:
            advice = "a smaller batch_size, more data, or more seconds"
            raise RuntimeError(f"no batch behind the first one of an epoch was taken: {advice}")
        text, estimate = said
        return {"text": text, **json.loads(estimate)}

    def across(self, by: Any = None) -> dict[str, Any]:
        """One view of all ranks of a job: which ones hold the others up, by how much, and because of which stage.

        Called by all processes behind the same step. `by` carries a report of less than 6 KiB from each to all: None
        (torch.distributed's default group), a process group, a communicator of mpi4py, or a folder that all share, one for each
        loader. In a folder no process waits for another: it reads what is there. Reports that are a minute older than its own, from
        before its start, or of a job with another number of processes do not count.

        `text` is a table and a sentence; `late` None or a dict of `ranks`, `how_many` these are (`"few"`, `"most"`, `"all"`), `host`
        (where they are all of a machine), `cost_ns` a step, `share` of it, `cause`, `without_core` (a CPU quota kept their own threads
        from a core, too) and `bad_share`; `compared` whether the reports were enough; `missing` lists the processes without a
        report; `ranks` has the reports.

        Waits for batches are compared. A rank that is late with its own part of the step (a stopped process, a thread that holds
        the interpreter's lock, a neighbour on its core, more work) is not seen by them: the others wait for it in the collective
        operation, and between two batches all ranks take the same time. Call `arrive()` before that operation in each step, and
        such a rank is named, with `cause` `"consumer"`; `own_parts` says whether all ranks did.
        """
        text, view = self._across(_ranks.reports(self, by))
        return {"text": text, **json.loads(view)}

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
        said = self._what_if(json.dumps(_settings.values({**change, "gpu_decode": gpu_decode})))
        return None if said is None else json.loads(said)

    def _repr_html_(self) -> str:
        """The report and a bar for each stage, for notebooks."""
        return _html.page(self.report(), self.verdict(), self.snapshot())

    def close(self) -> None:
        """Ends the open epoch, if there is one: its iterator raises. The loader can go on."""
        self._check_fork()
        self._supersede("close: one can be open")

    def _ended(self, epoch: Epoch[Out]) -> None:
        """Its loop came to its end."""
        if self._live is not None and self._live() is epoch:
            self._live = None
            if epoch._left == 0:
                self._behind = None
        self._leave(epoch)

    def _leave(self, epoch: Epoch[Out]) -> None:
        """It hands out no batch any more."""

    def _supersede(self, by: str) -> None:
        live = self._live() if self._live is not None else None
        self._live = None
        if live is not None:
            # First, so that a thread in its loop cannot take the end for that of the epoch.
            live._ended_by = by
            live.close()
            self._read = None

    def __reduce__(self) -> Any:
        raise TypeError("a loader has threads and is not pickled or copied: build it in the process that uses it")

    def __enter__(self) -> Self:
        self._check_fork()
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(ForkedError):
            self.close()

    # Sources

    @classmethod
    def images(cls, path: Paths, **settings: Unpack[Source]) -> Self:
        """A folder of pictures, with a folder per class or flat. Fields: `image`; with classes `label` (i64)."""
        return cls("images", path, **settings)

    @classmethod
    def records(cls, path: Paths, *, record_bytes: int, **settings: Unpack[Settings]) -> Self:
        """Records of a fixed size in one file, a folder, or the files of a pattern. Field: `record` (u8)."""
        return cls("records", path, record_bytes=record_bytes, **settings)

    @classmethod
    def tokens(
        cls,
        path: Paths,
        *,
        seq_len: int | None = None,
        token: str = "u16",
        next_token: bool = False,
        header_bytes: int | None = None,
        vocabulary: int | None = None,
        separator: int | None = None,
        index_file: Path | None = None,
        **settings: Unpack[Settings],
    ) -> Self:
        """Flat files of tokens (nanoGPT, llm.c), cut into windows of `seq_len`, or into documents. Field: `tokens`.

        `separator` is the token that ends a document (GPT-2's end of text: 50256) and belongs to it; for `packed` or `ragged`.
        `index_file` keeps the ends, which are else found each time by a pass over all tokens; it is made if it is missing.

        With `next_token` a window has one token more: the first `seq_len` are inputs, the last `seq_len` targets. The header of
        llm.c and modded-nanogpt is recognised and checked, files of other formats are refused; `header_bytes` skips another
        header, and 0 takes files as they are. The files do not tell the type of their tokens: with `vocabulary`, the number of
        ids, a larger id is an error of its sample.
        """
        if seq_len is None and separator is None and settings.get("packed") is None:
            raise TypeError("tokens: give seq_len, the tokens of a window, or separator, the token that ends a document")
        own = {"seq_len": seq_len, "token": token, "next_token": next_token or None, "header_bytes": header_bytes}
        own["vocabulary"] = vocabulary
        return cls("tokens", path, separator=separator, index_file=index_file, **own, **settings)

    @classmethod
    def megatron(
        cls,
        path: Paths,
        *,
        seq_len: int | None = None,
        documents: int | None = None,
        cut: bool = False,
        next_token: bool = False,
        vocabulary: int | None = None,
        **settings: Unpack[Settings],
    ) -> Self:
        """Megatron's .idx and .bin: windows of `seq_len` (2,048 by default), or whole documents of at most `documents` tokens.

        A longer document is an error; with `cut` it is its first `documents` tokens. With `vocabulary`, the number of ids, a
        larger id is an error of its sample.
        """
        own = {"seq_len": seq_len, "up_to": documents, "cut": cut or None, "next_token": next_token or None}
        own["vocabulary"] = vocabulary
        return cls("megatron", path, **own, **settings)

    @classmethod
    def webdataset(
        cls,
        path: Paths,
        *,
        image: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        elements: int | Mapping[str, int] | None = None,
        up_to: int | Mapping[str, int] | None = None,
        index_file: Path | None = None,
        **settings: Unpack[Source],
    ) -> Self:
        """Tar shards, as in "train-{0000..0127}.tar". Without `image` ("jpg;png") and `columns` the first sample tells.

        Fields: `image`; `label` of the member "cls"; other members as bytes, padded to `up_to` (by default the longest), with
        their lengths in NAME.lens. "ids:u16:?" is a member of numbers, of any length up to `up_to`. An index is kept beside each shard (NAME.tar.fdx), or in `index_file`.

        With image=["left.png", "right.png"] pictures are fields of these names. Those of a sample share one crop and one flip;
        if a random crop meets two sizes, the sample is bad. "frames.*.jpg" is a list of the members frames.0.jpg, frames.1.jpg
        and so on, at most `elements` (a number, or a dict from ending to number): [elements, height, width, 3], padded by
        zeros, with their count in NAME.lens.
        """
        own: dict[str, Any] = {"image": image, "columns": columns, "up_to": up_to, "index_file": index_file}
        return cls("tar", path, elements=elements, **own, **settings)

    @classmethod
    def parquet(
        cls,
        path: Paths,
        *,
        columns: Sequence[str] | None = None,
        image: str | Sequence[str] | None = None,
        elements: int | Mapping[str, int] | None = None,
        stack: str | None = None,
        up_to: int | Mapping[str, int] | None = None,
        null_zero: bool | None = None,
        **settings: Unpack[Texts],
    ) -> Self:
        """Parquet files. `stack` joins the columns into one field; `null_zero`: nulls are 0 or empty.

        `up_to` is the most elements of lists of any length and of texts, for all or by column; shorter rows are padded, with
        their lengths in NAME.lens. Without it the longest text is looked for when the loader is built.

        With image=["left", "right"] the pictures of a row share one crop and one flip; if a random crop meets two sizes, the
        row is bad. A column of lists of pictures takes `elements`, the most pictures of a row: [elements, height, width, 3],
        padded by zeros, with their count in NAME.lens. For lists of texts give elements={NAME: NUMBER} and the most bytes of a
        text, up_to={NAME: NUMBER}: [elements, up_to] bytes, with the length of each text in NAME.sizes.
        """
        own: dict[str, Any] = {"columns": columns, "image": image, "stack": stack, "up_to": up_to, "null_zero": null_zero}
        return cls("parquet", path, elements=elements, **own, **settings)

    @classmethod
    def delta(
        cls,
        table: Any,
        version: int | None = None,
        **settings: Unpack[Columns],
    ) -> Self:
        """A Delta table: a path, an address, or a `DeltaTable` of `deltalake`, which reads the log. Other settings as in `parquet`.

        It is one version, by default the latest at this time; a state resumes with this version only. Partition columns have the
        table's types, dates are days since 1970. Tables with deletion vectors or column mapping are refused.
        """
        return cls("parquet", [""], **_tables.settings(_tables.delta, table, version, settings))

    @classmethod
    def iceberg(
        cls,
        table: Any,
        snapshot_id: int | None = None,
        **settings: Unpack[Columns],
    ) -> Self:
        """An Iceberg table: a `Table` of `pyiceberg`, or the path of a metadata file. Other settings as in `parquet`.

        It is one snapshot, by default the current one; a state resumes with this snapshot only. Tables with deletes or renamed
        columns are refused.
        """
        return cls("parquet", [""], **_tables.settings(_tables.iceberg, table, snapshot_id, settings))

    @classmethod
    def tfrecord(
        cls,
        path: Paths,
        *,
        image: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        up_to: int | Mapping[str, int] | None = None,
        missing_zero: bool | None = None,
        context_only: bool | None = None,
        index_file: Path | None = None,
        **settings: Unpack[Source],
    ) -> Self:
        """TFRecord files of tf.train.Example. Columns: "label" one integer, "boxes:f32:4" four floats, "ids:i64:?" any number
        up to `up_to`, "text:bytes" bytes up to `up_to` (by default the largest record); lengths are in NAME.lens.

        `missing_zero`: columns that are missing or empty are zeros, or of length 0. `context_only`: of a
        tf.train.SequenceExample the context.
        """
        own: dict[str, Any] = {"image": image, "columns": columns, "up_to": up_to, "index_file": index_file}
        own |= {"missing_zero": missing_zero, "context_only": context_only}
        return cls("tfrecord", path, **own, **settings)

    @classmethod
    def jsonl(
        cls,
        path: Paths,
        *,
        columns: Sequence[str] | None = None,
        elements: Mapping[str, int] | None = None,
        up_to: int | Mapping[str, int] | None = None,
        missing_zero: bool | None = None,
        index_file: Path | None = None,
        **settings: Unpack[Texts],
    ) -> Self:
        """JSON lines: one object a line, in plain files, or in gzip or zstd files (.gz, .zst). Without `columns` the field
        `line` has each line as it is stored.

        Columns are values by key: "text:bytes" a string, "meta.label" one integer, "x:f32:4" four floats, "ids:i32:?" any number
        up to `up_to`, "tools:json" any value as it is stored; '"a.b".c:i64' quotes a key. Strings are bytes in UTF-8 up to
        `up_to` (by default the longest line); lengths are in NAME.lens. "messages[].content:bytes" is a list of texts:
        give elements={NAME: NUMBER} and the most bytes of a text, up_to={NAME: NUMBER}: [elements, up_to] bytes, with the
        length of each text in NAME.sizes.

        `missing_zero`: values that are missing or null are zeros, or of length 0. An index of the lines is kept beside each
        file (NAME.fdx), or in `index_file`. Plain files are read in any order; compressed ones in chunks.

        With `tokenizer` the column is "text:bytes" by default, and with `chat` the whole line.
        """
        own: dict[str, Any] = {"columns": columns, "elements": elements, "up_to": up_to}
        own |= {"missing_zero": missing_zero, "index_file": index_file}
        return cls("jsonl", path, **own, **settings)

    @classmethod
    def arrow(
        cls,
        path: Paths,
        *,
        columns: Sequence[str] | None = None,
        image: str | Sequence[str] | None = None,
        up_to: int | Mapping[str, int] | None = None,
        null_zero: bool | None = None,
        index_file: Path | None = None,
        **settings: Unpack[Texts],
    ) -> Self:
        """Arrow data of Hugging Face's `datasets`: a folder of `save_to_disk`, the files of its cache ("imdb-train-*.arrow"),
        other Arrow IPC streams and files. Without `columns` and `image` all columns are taken, `Image` as pictures.

        `up_to` is the most elements of lists of any length and of texts, for all or by column; shorter rows are padded, with
        their lengths in NAME.lens. "x:f32:768" is a list in this shape, "answer.text" a part of a structure. Texts are bytes in
        UTF-8, class labels integers. `null_zero`: nulls are 0 or empty. With image=["left", "right"] the pictures of a row
        share one crop and one flip.

        Rows are read in any order. An index is kept beside each file (NAME.fdx), or in `index_file`.
        """
        own: dict[str, Any] = {"columns": columns, "image": image, "up_to": up_to, "null_zero": null_zero}
        return cls("arrow", path, index_file=index_file, **own, **settings)

    @classmethod
    def mds(
        cls,
        path: Paths,
        *,
        columns: Sequence[str] | None = None,
        up_to: int | Mapping[str, int] | None = None,
        raw: Sequence[str] | None = None,
        follow_links: bool = False,
        **settings: Unpack[Source],
    ) -> Self:
        """Shards of MosaicML Streaming.

        Columns of bytes are padded to `up_to`, by default the largest sample. Lists (`ndarray:DTYPE`) need `up_to`, their most
        elements. Lengths are in NAME.lens. `raw` declares columns of `bytes` and `ndarray` as arrays: "x:f32:4",
        "image:u8:28x28", or "tokens:i64:?" for any length up to `up_to`. `follow_links`: links of shards may lead out of the
        folder of the index.
        """
        return cls("mds", path, columns=columns, up_to=up_to, raw=raw, follow_links=follow_links or None, **settings)

    @classmethod
    def npy(
        cls,
        path: Paths,
        *,
        rows: bool = False,
        up_to: int | None = None,
        flat: int | None = None,
        **settings: Unpack[Settings],
    ) -> Self:
        """NumPy arrays: a sample per file, or per row of the first axis. Field: `array`.

        `up_to` bounds a first dimension that varies. `flat` bounds the elements of arrays that vary in any dimension: they
        come as vectors, with the shape in `array.shape`.
        """
        return cls("npy", path, rows=rows or None, up_to=up_to, flat=flat, **settings)

    @classmethod
    def npz(
        cls,
        path: Paths,
        *,
        columns: Sequence[str] | None = None,
        rows: bool = False,
        up_to: int | Mapping[str, int] | None = None,
        flat: int | None = None,
        **settings: Unpack[Settings],
    ) -> Self:
        """Archives of NumPy arrays. `up_to` and `flat` as in `npy`, for the columns that vary; others keep their shape."""
        return cls("npz", path, columns=columns, rows=rows or None, up_to=up_to, flat=flat, **settings)

    @classmethod
    def safetensors(
        cls, path: Paths, *, columns: Sequence[str] | None = None, **settings: Unpack[Settings]
    ) -> Self:
        """safetensors files: a sample per row of their tensors. 8-bit floats come as u8, bit by bit."""
        return cls("safetensors", path, columns=columns, **settings)

    @_OnClass
    def dataset(cls, dataset: Any, **settings: Unpack[Settings]) -> Self:
        """A map-style dataset in Python, as torch.utils.data has them, read by threads: the last resort.

        `dataset[i]` is a number, array or tensor, or a dict or tuple of them (fields 0, 1, …), with the shapes of the first
        sample. It is called by several threads and holds the GIL as far as its code does.
        """
        return cls("dataset", [""], samples=_code.samples(dataset, type(dataset).__name__), **settings)
