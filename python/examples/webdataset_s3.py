"""Read WebDataset shards from S3, and keep what was read on a local disk for the next epoch and the next run."""

import os

import feedline.torch as fl
from small_data import bucket, folder, shards  # made for this page

SHARDS, CACHE = "s3://data/train-{0000..0003}.tar", folder()  # yours: your bucket, "/nvme/feedline"

with bucket(shards(4, per_shard=25)) as (address, requests):
    # Yours: nothing. Credentials and region come from where AWS's command line has them.
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"}

    for run in ("first", "second"):
        loader = fl.webdataset(SHARDS, size=32, batch_size=20, shuffle=42, cache=CACHE, device="cpu")
        steps, opened = len(loader), len(requests)
        classes = sum(labels.bincount(minlength=4) for images, labels in loader)
        print(f"{run} run: {steps} batches, {opened} requests to open the shards, {len(requests) - opened} for samples")
        assert classes.tolist() == [25, 25, 25, 25]
        assert run == "first" or len(requests) == opened, "all samples are on the disk"
        print(loader.report().split("memory")[0])
        requests.clear()
        del loader  # which waits until what it read is on the disk
