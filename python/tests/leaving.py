"""A process that ends with a loader, an iterator, a batch and a tensor alive: `leaving.py FOLDER DRIVER KERNELS ORDER HOW HUNG`.

ORDER are the first letters of the names in the order in which the interpreter takes them apart. HOW the process ends: falls off
its end, by an exit, an exception, at once, or in a fork's child first. HUNG: the GPU answers nothing any more.
"""

import os
import sys
import threading
from pathlib import Path

import numpy as np

import standin

from feedline import Loader

folder, driver, kernels, order, how, hung = sys.argv[1:]
cuda = standin.Cuda(driver, kernels)
path = Path(folder) / "records.bin"
np.zeros((100, 48), dtype=np.uint8).tofile(path)


class Held:
    """As a tensor of a framework: what frees it calls the deleter."""

    def __init__(self, tensor):
        self.taken = standin.Taken(tensor)

    def __del__(self, drop=standin.Taken.drop):
        drop(self.taken)


def begin():
    loader = Loader("records", path, record_bytes=48, batch_size=10, device="cuda:0", device_batches=3)
    epoch = loader.epoch(0)
    first, second = next(epoch), next(epoch)
    return {"loader": loader, "epoch": epoch, "batch": second, "tensor": Held(first["record"])}


alive = begin()
for letter in order:
    name = next(name for name in alive if name[0] == letter)
    # Names go in the order in which they came.
    globals()[name] = alive.pop(name)
if how == "cycle":
    # Found by no collection before the end.
    globals()["tensor"].itself = globals()["tensor"]
if hung == "hung":
    cuda.library.standin_hold(True)
    threading.Thread(target=lambda: next(globals()["epoch"]), daemon=True).start()
if how == "fork" and os.fork() == 0:
    sys.exit(0)
if how == "fork":
    assert os.wait()[1] == 0
if how == "exit":
    sys.exit(3)
if how == "at once":
    os._exit(3)
if how == "raise":
    raise ValueError("the program's own")
