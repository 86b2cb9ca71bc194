"""Makes a bucket and copies a folder into it: upload.py s3|gs|az FOLDER

s3: AWS_ENDPOINT_URL and keys. gs: FEEDLINE_GCS. az: the emulator's own account at FEEDLINE_AZURE.
"""

import os
import sys
import time
import urllib.parse
import urllib.request


def s3():
    import boto3

    # A store that is only just up may need a while for its pools.
    store = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    again(lambda: store.create_bucket(Bucket="bucket"))
    return lambda path, key: store.upload_file(path, "bucket", key)


def gs():
    place = os.environ["FEEDLINE_GCS"]

    def post(url, data, kind):
        request = urllib.request.Request(place + url, data, {"Content-Type": kind})
        urllib.request.urlopen(request, timeout=30).read()

    def put(path, key):
        with open(path, "rb") as file:
            name = urllib.parse.quote(key, safe="")
            post(f"/upload/storage/v1/b/bucket/o?uploadType=media&name={name}", file.read(), "application/octet-stream")

    again(lambda: post("/storage/v1/b?project=p", b'{"name": "bucket"}', "application/json"))
    return put


def az():
    from azure.storage.blob import ContainerClient

    # The key that every copy of the emulator has.
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    account = {"account_name": "devstoreaccount1", "account_key": key}
    container = ContainerClient(os.environ["FEEDLINE_AZURE"] + "/devstoreaccount1", "bucket", credential=account)
    again(container.create_container)

    def put(path, key):
        with open(path, "rb") as file:
            container.upload_blob(key, file)

    return put


def again(action, seconds=60):
    end = time.monotonic() + seconds
    while True:
        try:
            return action()
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.3)


put = {"s3": s3, "gs": gs, "az": az}[sys.argv[1]]()
for folder, _, names in os.walk(sys.argv[2]):
    for name in names:
        path = os.path.join(folder, name)
        put(path, os.path.relpath(path, sys.argv[2]))
