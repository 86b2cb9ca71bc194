"""Train and validate on a folder of pictures with a folder per class, as ImageNet has them."""

import torch
from torch import nn

import feedline.torch as fl
from small_data import pictures  # made for this page

TRAIN, VALIDATION = pictures(240), pictures(60, seed=2)  # yours: "imagenet/train", "imagenet/val"
CLASSES, SIZE, BATCH = 4, 32, 32  # yours: 1000, 224, 256

floats = {"size": SIZE, "dtype": "f32", "normalize": fl.IMAGENET, "batch_size": BATCH}
train = fl.images(TRAIN, shuffle=42, last_batch="drop", **floats)  # a random part of each picture, a random flip
validation = fl.images(VALIDATION, **floats)  # in order, the middle of each picture

device = torch.device(train.device)  # the GPU, if PyTorch can use one: batches are there already
layers = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)]
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)

for epoch in range(3):
    for images, labels in train:  # f32 [32, 3, 32, 32] and i64 [32]
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in validation)
    print(f"epoch {epoch}: {right} of {len(validation.dataset)} right")

print(train.report())
assert right > 0.9 * len(validation.dataset)
