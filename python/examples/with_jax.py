"""Train with JAX: each batch is one array over all devices of a mesh."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # yours: leave this out

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import feedline.jax as fj
from small_data import pictures

DATA, BATCH = pictures(256), 32  # yours: "imagenet/train", 1024

mesh = jax.make_mesh((jax.device_count(),), ("data",))
rows = NamedSharding(mesh, P("data"))
loader = fj.images(DATA, size=32, dtype="f32", global_batch=BATCH, shuffle=42, last_batch="drop", sharding=rows)


@jax.jit
def step(weights, images, labels):
    def loss(weights):
        means = images.mean(axis=(1, 2))  # pictures are [rows, height, width, channels]
        return -jnp.take_along_axis(jax.nn.log_softmax(means @ weights), labels[:, None], axis=1).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 2.0 * gradient, value


weights = jax.device_put(jnp.zeros((3, 4)), NamedSharding(mesh, P()))
losses = []
for epoch in range(5):
    for batch in loader:
        weights, value = step(weights, batch["image"], batch["label"].astype(jnp.int32))
        losses.append(float(value))

assert batch["image"].shape == (BATCH, 32, 32, 3) and batch["image"].sharding == rows
print(f"{len(batch['image'].addressable_shards)} devices, loss {losses[0]:.2f} to {losses[-1]:.2f}")
assert losses[-1] < 0.8 * losses[0]
