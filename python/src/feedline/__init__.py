"""feedline's batches in Python, as DLPack tensors on the host or on a GPU.

    import feedline.torch as fl

    loader = fl.images("train/", size=224, batch_size=256, shuffle=42, device="cuda", dtype="f16")
    for epoch in range(90):
        for images, labels in loader: ...
    print(loader.report())

`feedline.torch`, `feedline.numpy` and `feedline.jax` hand out tensors of these libraries. This module hands out a `Batch` of
`Tensor`, for any consumer of DLPack.
"""

import atexit as _atexit
import os as _os

from . import errors
from ._code import BatchArrays, PythonCostWarning
from ._loader import Epoch, Loader, estimate, ramp, state_at, state_trained
from ._native import Tensor, __version__, _enter, _leave
from ._observe import Observed, observe
from ._tensors import Batch, to_jax, to_numpy, to_torch

__all__ = [
    "IMAGENET",
    "Batch",
    "BatchArrays",
    "Epoch",
    "Loader",
    "Observed",
    "PythonCostWarning",
    "Tensor",
    "__version__",
    "errors",
    "estimate",
    "observe",
    "ramp",
    "state_at",
    "state_trained",
    "to_jax",
    "to_numpy",
    "to_torch",
]

# Threads that call Python functions must be out of the interpreter before it ends.
_atexit.register(_leave)
_os.register_at_fork(after_in_child=_enter)

#: Mean and standard deviation of ImageNet's pictures, as pretrained models expect: `normalize=IMAGENET`.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
