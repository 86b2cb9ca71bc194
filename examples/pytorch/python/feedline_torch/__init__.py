"""feedline's batches in Python, as DLPack tensors.

    loader = feedline_torch.Loader("images", "train/", batch_size=256, decode_size=224, seed=42)
    for batch in loader.epoch(0):
        images = torch.from_dlpack(batch["image"])  # uint8 [256, 224, 224, 3], without a copy
"""

from ._native import Epoch, Loader, Tensor

__all__ = ["Epoch", "Loader", "Tensor", "to_numpy", "to_torch"]


def to_torch(batch):
    """The batch as a dict of PyTorch tensors, without a copy. Each Tensor can be taken once."""
    import torch

    return {name: torch.from_dlpack(tensor) for name, tensor in batch.items()}


def to_numpy(batch):
    """The batch as a dict of NumPy arrays, without a copy. NumPy has no bf16."""
    import numpy

    return {name: numpy.from_dlpack(tensor) for name, tensor in batch.items()}
