"""Python functions in the pipeline, as the native loader calls them.

Each call holds the GIL: `map_batch` once per batch, decoders and datasets once per sample. Free-threaded Python has none: there
workers call decoders and datasets at once, and `map_batch` in turn.
"""

from __future__ import annotations

import time
import traceback
import warnings
from typing import Any, Callable, Iterator, Mapping, Sequence

from ._settings import plain
from .errors import ChangedError

__all__ = ["BatchArrays", "PythonCostWarning"]


class PythonCostWarning(RuntimeWarning):
    """Samples pass through Python code, one at a time."""


class BatchArrays(dict[str, Any]):
    """What `map_batch` gets: a dict from name to array, which it changes in place or assigns to.

    An assigned value is copied to the place of the array, whose shape and element type it must fit. The arrays end with the call.
    """

    __slots__ = ("batch", "epoch", "seed", "valid")

    seed: int
    """Depends on the loader's seed, the epoch and the batch alone: `numpy.random.default_rng(batch.seed)`."""
    epoch: int
    batch: int
    """The number of the batch in its epoch."""
    valid: int
    """Leading rows that are samples of the epoch; others fill the batch up."""


def map_batch(function: Callable[[BatchArrays], Any], take: Callable[[Any], Any]) -> Callable[..., None]:
    """The function as the native loader calls it; `take` makes an array of a lent one."""
    if not callable(function):
        raise TypeError(f"map_batch is {function!r}: give a function of a batch")

    def call(lent: dict[str, Any], seed: int, epoch: int, number: int, valid: int) -> None:
        arrays = {name: take(array) for name, array in lent.items()}
        lent.clear()
        batch = BatchArrays(arrays)
        batch.seed, batch.epoch, batch.batch, batch.valid = seed, epoch, number, valid
        try:
            said = function(batch)
            if said is not None:
                raise TypeError(f"map_batch returned {type(said).__name__}: assign to the fields of its batch, and return None")
            _copy_assigned(arrays, batch)
        except BaseException as error:
            # Frames in the traceback would keep the arrays.
            link: BaseException | None = error
            while link is not None:
                traceback.clear_frames(link.__traceback__)
                link = link.__cause__ or link.__context__
            raise
        finally:
            batch.clear()
            arrays.clear()

    return call


def _copy_assigned(arrays: dict[str, Any], batch: BatchArrays) -> None:
    for name, value in batch.items():
        if name not in arrays:
            raise KeyError(f"map_batch assigned {name!r}, and the batch has {', '.join(arrays)}: declare it by `adds`")
        if value is not arrays[name]:
            _assign(name, arrays[name], value)


def _assign(name: str, place: Any, value: Any) -> None:
    if tuple(value.shape) != tuple(place.shape) or value.dtype != place.dtype:
        there, given = (f"{array.dtype} {list(array.shape)}" for array in (place, value))
        raise ValueError(f"map_batch assigned {given} to {name!r}, which is {there}")
    place[...] = value


def numpy_array(lent: Any) -> Any:
    return lent.numpy()


def decoders(given: Mapping[str, tuple[Callable[..., Any], Any, Any]]) -> list[Any]:
    """The setting `decoders` as the native loader takes it."""
    entries = _entries("decoders", given, "function", "element type", "shape or most elements")
    for name, (function, *_) in entries:
        if not callable(function):
            raise TypeError(f"decoders: {name!r} has {function!r}: give a function of bytes and a seed")
    if entries:
        names = ", ".join(given)
        words = f"a Python function decodes {names}: it is called for each sample and holds the GIL; `report()` shows the cost"
        warnings.warn(words, PythonCostWarning, stacklevel=4)
    shaped = {name: (function, dtype, plain(shape)) for name, (function, dtype, shape) in entries}
    return [(_decoder(name, *of), (name, element(of[1]), of[2])) for name, of in shaped.items()]


def _entries(setting: str, given: Any, *parts: str) -> list[tuple[str, Any]]:
    """The entries of a setting that is a dict from field to a tuple of these parts."""
    entries = list(given.items()) if isinstance(given, Mapping) else [("", None)]
    for _, entry in entries:
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != len(parts):
            raise TypeError(f"{setting}={given!r}: give a dict from field to ({', '.join(parts)})")
    return entries


def _decoder(name: str, function: Callable[[bytes, int], Any], dtype: Any, shape: Any) -> Callable[[bytes, int], bytes]:
    import numpy

    numbers = _numpy(element(dtype))

    def call(data: bytes, seed: int) -> bytes:
        array = numpy.asarray(function(data, seed), dtype=numbers)
        if not isinstance(shape, int) and array.shape != tuple(shape):
            raise ValueError(f"the decoder of {name!r} gave the shape {array.shape}; declared is {tuple(shape)}")
        return array.tobytes()

    return call


def samples(dataset: Any, name: str) -> tuple[Any, ...]:
    """A map-style dataset as the native loader takes it; the fields are those of its first sample."""
    import numpy

    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"{name} is no map-style dataset: len(dataset) and dataset[i] are needed, for the order and for ranks")
    count = len(dataset)
    if count == 0:
        raise ValueError(f"{name} has no samples")
    first = dict(_items(dataset[0]))
    start = time.perf_counter()
    dataset[count - 1]
    took = time.perf_counter() - start
    fields = [(key, element(array.dtype), array.shape) for key, array in first.items()]

    def check() -> None:
        if len(dataset) != count:
            raise ChangedError(f"{name} has {len(dataset)} samples, {count} when the loader was built: build a new loader")

    def call(index: int) -> tuple[bytes, ...]:
        sample = dict(_items(dataset[index]))
        if sample.keys() != first.keys():
            raise ValueError(f"sample {index} has {', '.join(sample)}; sample 0 has {', '.join(first)}")
        for key, array in sample.items():
            if array.shape != first[key].shape or array.dtype != first[key].dtype:
                there, here = (f"{a.dtype} {list(a.shape)}" for a in (first[key], array))
                raise ValueError(f"{key!r} of sample {index} is {here}; of sample 0 {there}")
        return tuple(numpy.ascontiguousarray(sample[key]).tobytes() for key in first)

    warnings.warn(
        f"each sample is made by Python code of {name}, which took {1e3 * took:.3g} ms for the last one: as far as it holds "
        f"the GIL, no more than {1 / max(took, 1e-7):.3g} samples/s. feedline's own formats do not need the GIL",
        PythonCostWarning,
        stacklevel=4,
    )
    return call, count, name, fields, check


def _items(sample: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a sample by name; those of a tuple are called 0, 1, …"""
    if isinstance(sample, Mapping) and not all(isinstance(name, str) for name in sample):
        raise TypeError(f"a sample has the names {list(sample)}: names are strings")
    if not isinstance(sample, Mapping):
        sample = {str(place): value for place, value in enumerate(sample if isinstance(sample, (tuple, list)) else (sample,))}
    return ((name, _array(name, value)) for name, value in sample.items())


def _array(name: str, value: Any) -> Any:
    import numpy

    if hasattr(value, "detach"):
        try:
            value = value.detach().cpu().numpy()
        except TypeError as error:
            raise TypeError(f"{name!r} of a sample is a tensor of {value.dtype}, which NumPy has not: give another type") from error
    try:
        array = numpy.asarray(value)
    except ValueError as error:
        raise TypeError(f"{name!r} of a sample is no array ({error}): give values of one shape, or each as a field") from error
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        kind = f"an array of {array.dtype}" if isinstance(value, numpy.ndarray) else type(value).__name__
        raise TypeError(f"{name!r} of a sample is {kind}: samples are numbers, arrays and tensors of at most 64 bits")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def adds(given: Mapping[str, tuple[Any, Sequence[int]]]) -> list[Any]:
    """The setting `adds` as the native loader takes it."""
    entries = _entries("adds", given, "element type", "shape")
    shaped = [(name, element(dtype), plain(shape)) for name, (dtype, shape) in entries]
    for name, _, shape in shaped:
        if not isinstance(shape, (tuple, range)) or any(type(size) is not int or size < 1 for size in shape):
            raise ValueError(f"adds: the shape of {name!r} is {shape}: give a tuple of sizes from 1, () for one number per row")
    return shaped


_NAMES = {"half": "f16", "float": "f32", "double": "f64", "bfloat16": "bf16", "int": "i64", "long": "i64"}


def element(dtype: Any) -> str:
    """feedline's name of an element type of torch or NumPy."""
    name = getattr(dtype, "__name__", None) or str(dtype).rsplit(".", 1)[-1]
    for long, short in (("uint", "u"), ("int", "i"), ("float", "f")):
        if name.startswith(long) and name[len(long) :].isdigit():
            return short + name[len(long) :]
    return _NAMES.get(name, name)


def _numpy(name: str) -> str:
    """NumPy's name of an element type."""
    if name == "bf16":
        raise TypeError("NumPy has no bf16: decode to f32")
    return name if name == "bool" else {"u": "uint", "i": "int", "f": "float"}[name[0]] + name[1:]
