"""Train a diffusion model on pictures of all shapes: each batch has the one shape that fits its pictures best."""

from collections import Counter

import feedline.torch as fl
from small_data import folder, pictures

DATA = pictures(400, sizes=[(64, 64), (96, 64), (64, 96), (120, 60), (72, 64)])  # yours: "laion/"
BUCKETS = [(64, 64), (80, 48), (48, 80)]  # (height, width); yours: [(1024, 1024), (1360, 768), (768, 1360)]

# From the headers, once; yours: a file that stays.
sizes = fl.images(DATA, size=8).picture_sizes(folder() / "train.sizes")
settings = {"dtype": "f32", "normalize": (0.5, 0.5), "batch_size": 16, "shuffle": 42, "output": "dict"}
# Each bucket has a last batch. Of a data set as small as this one they repeat more than the 1 % that is allowed.
loader = fl.images(DATA, buckets=BUCKETS, sizes=sizes, last_batch_share=0.2, **settings)

shapes: Counter[tuple[int, ...]] = Counter()
for batch in loader:
    images = batch["image"]  # f32 [16, 3, height, width], from -1 to 1
    height, width, top, left, *bucket = batch["image.geometry"].unbind(1)  # what SDXL is conditioned on
    shapes[tuple(images.shape[2:])] += len(images)
    assert all((side == size).all() for side, size in zip(bucket, images.shape[2:]))

print(shapes)
assert set(shapes) == set(BUCKETS) and sum(shapes.values()) >= 400
