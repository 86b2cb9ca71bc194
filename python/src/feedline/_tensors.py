"""A batch, and what becomes of it in other libraries."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable

from ._native import Tensor

if TYPE_CHECKING:
    import jax
    import numpy
    import torch


class Batch(dict[str, Tensor]):
    """A batch: a dict from name to `Tensor`, each of which can be taken once."""

    __slots__ = ()

    def bind(self, stream: Any) -> None:
        """On a GPU, orders the batch with the work of one more stream, beside the one that takes its tensors.

        What the stream is given from here on finds the data, and the batch's memory is used again only behind the work that it
        was given until the last tensor of the batch is gone. A stream of torch, CuPy or cuda.core, which the batch keeps; or a
        handle (int), whose stream must live until then.
        """
        self._any().bind(stream)

    def used_on(self, stream: Any) -> None:
        """On a GPU, says that one more stream works on the batch after the stream that took it, as `record_stream` of PyTorch
        says of its own tensors: the memory is used again only behind its work too. The stream does not wait for the batch.
        """
        self._any().used_on(stream)

    def _any(self) -> Tensor:
        for tensor in self.values():
            if isinstance(tensor, Tensor):
                return tensor
        raise BufferError("no tensor is in the batch any more: bind streams before its tensors are replaced")


def to_torch(batch: Batch) -> dict[str, torch.Tensor]:
    """The batch as a dict of PyTorch tensors, without a copy, where they lie. Each Tensor can be taken once.

    On a GPU they are ordered with PyTorch's current stream of that GPU.
    """
    import torch

    return {name: torch.from_dlpack(tensor) for name, tensor in batch.items()}


def to_numpy(batch: Batch) -> dict[str, numpy.ndarray]:
    """The batch as a dict of NumPy arrays, without a copy. NumPy has no bf16, and takes host memory only."""
    for name, tensor in batch.items():
        if tensor.__dlpack_device__()[0] != 1:
            raise BufferError(f"{name!r} is {tensor!r}: NumPy takes host memory, as a loader with device=\"cpu\" hands out")
    take = numpy_taker()
    return {name: take(tensor) for name, tensor in batch.items()}


@functools.cache
def numpy_taker() -> Callable[[Tensor], numpy.ndarray]:
    """What makes a NumPy array of a tensor. NumPy 2.1.0 to 2.2.4 take every array of DLPack as read-only."""
    import numpy

    new = numpy.lib.NumpyVersion(numpy.__version__) >= "2.2.5"

    def take(tensor: Tensor) -> numpy.ndarray:
        if tensor.dtype == "bf16":
            raise BufferError(f"{tensor!r}: NumPy has no bf16; read it by feedline.torch or feedline.jax, or leave it out by `keep`")
        array = numpy.from_dlpack(tensor)
        return array if new or array.flags.writeable else numpy.asarray(_Writable(array))

    return take


class _Writable:
    """The base of an array that sees the memory of another one, and may write to it."""

    def __init__(self, array: numpy.ndarray):
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def to_jax(batch: Batch) -> dict[str, jax.Array]:
    """The batch as a dict of JAX arrays, where they lie; JAX copies what its alignment or read-only rule asks for.

    On a GPU they are ordered with the stream on which JAX computes. A JAX of 32 bits takes lengths, offsets and ids as `uint32`,
    f64 as f32, and no other integers of 64 bits.
    """
    from .jax import arrays

    return arrays(batch)
