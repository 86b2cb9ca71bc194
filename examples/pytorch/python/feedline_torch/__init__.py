"""feedline's batches in Python, as DLPack tensors on the host or on a GPU.

    loader = feedline_torch.Loader("images", "train/", batch_size=256, decode_size=224, seed=42)
    for batch in loader.epoch(0):
        images = torch.from_dlpack(batch["image"])  # uint8 [256, 224, 224, 3], without a copy
"""

from ._native import Epoch, Loader, Tensor

__all__ = ["IMAGENET", "Batch", "Epoch", "Loader", "Tensor", "to_numpy", "to_torch"]

#: Mean and standard deviation of ImageNet's pictures, as pretrained models expect: `normalize=IMAGENET`.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Batch(dict):
    """A batch: a dict from name to `Tensor`, each of which can be taken once."""

    __slots__ = ()

    def bind(self, stream):
        """On a GPU, orders the batch with the work of one more stream, beside those that take its tensors.

        What the stream is given from here on finds the data, and the batch's memory is used again only behind the work that it
        was given until the last tensor of the batch is gone. A handle (int), or a stream of torch, CuPy or cuda.core; it must
        live until then. Call it while at least one tensor is not taken.
        """
        for tensor in self.values():
            if isinstance(tensor, Tensor) and not tensor.taken:
                return tensor.bind(stream)
        raise BufferError("every tensor of the batch was handed over: bind streams before the last one is taken")


def to_torch(batch):
    """The batch as a dict of PyTorch tensors, without a copy, where they lie. Each Tensor can be taken once.

    On a GPU they are ordered with PyTorch's current stream of that GPU.
    """
    import torch

    return {name: torch.from_dlpack(tensor) for name, tensor in batch.items()}


def to_numpy(batch):
    """The batch as a dict of NumPy arrays, without a copy. NumPy has no bf16, and takes host memory only."""
    import numpy

    for name, tensor in batch.items():
        if tensor.__dlpack_device__()[0] != 1:
            raise BufferError(f"{name!r} is {tensor!r}: NumPy takes host memory, as a loader with device=\"cpu\" hands out")
    return {name: numpy.from_dlpack(tensor) for name, tensor in batch.items()}
