"""Loaders whose batches are dicts of JAX arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import IMAGENET
from ._loader import Epoch, Loader as _Loader
from ._tensors import Batch, to_jax

if TYPE_CHECKING:
    import jax

__all__ = [
    "IMAGENET",
    "Epoch",
    "Loader",
    "images",
    "records",
    "tokens",
    "megatron",
    "webdataset",
    "parquet",
    "tfrecord",
    "mds",
    "npy",
    "npz",
    "safetensors",
    "dataset",
]


class Loader(_Loader["dict[str, jax.Array]"]):
    """Hands out JAX arrays."""

    @classmethod
    def _ranks(cls) -> tuple[int, int] | None:
        import jax

        return (jax.process_index(), jax.process_count()) if jax.process_count() > 1 else super()._ranks()

    def _out(self, batch: Batch) -> dict[str, jax.Array]:
        return to_jax(batch)


images = Loader.images
records = Loader.records
tokens = Loader.tokens
megatron = Loader.megatron
webdataset = Loader.webdataset
parquet = Loader.parquet
tfrecord = Loader.tfrecord
mds = Loader.mds
npy = Loader.npy
npz = Loader.npz
safetensors = Loader.safetensors
dataset = Loader.dataset
