"""From PyTorch's DataLoader to feedline step by step. Each step runs by itself, and the batches stay the same."""

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import feedline.torch as fl
from small_data import pictures  # made for this page

DATA = pictures(60)  # yours: "imagenet/val"
crop = v2.Compose([v2.Resize(36), v2.CenterCrop(32), v2.PILToTensor()])


def batches(loader):
    return [(images.clone(), labels.clone()) for images, labels in loader]


# 0. What you have.
dataset = ImageFolder(DATA, crop)
before = batches(DataLoader(dataset, batch_size=16, num_workers=2))

# 1. The same dataset, without worker processes: exact resume, ranks and reports, with no other line changed. Your Python code
#    still decodes, so it is as fast as that code leaves the GIL. feedline warns of this.
step_1 = batches(fl.dataset(dataset, batch_size=16, device="cpu"))

# 2. The files themselves: threads read, decode and crop without the GIL. The crop is of 7/8 of the short side, as in
#    Resize(256), CenterCrop(224).
step_2 = batches(fl.images(DATA, size=32, batch_size=16, device="cpu"))

# 3. Floats, shuffled and augmented, on the GPU if there is one.
training = fl.images(DATA, size=32, batch_size=16, shuffle=42, dtype="f32", normalize=fl.IMAGENET)
for images, labels in training:
    assert images.dtype == torch.float32 and images.device == torch.device(training.device)

for number, after in enumerate((step_1, step_2), 1):
    assert len(before) == len(after)
    apart = max((one.int() - other.int()).abs().max().item() for (one, _), (other, _) in zip(before, after))
    same = all(torch.equal(one, other) for (_, one), (_, other) in zip(before, after))
    print(f"step {number}: pictures differ by at most {apart}, labels {'are the same' if same else 'differ'}")
    assert apart <= number - 1 and same
