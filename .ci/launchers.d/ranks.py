"""Starts the ranks of a run in actors of Ray: ranks.py train|actors WORLD LOGS, until the code of all is 0.

train: Ray Train, which sets the variables and starts all workers again when one fails. actors: plain actors, to which this
script gives RANK and WORLD_SIZE, and which it starts again. The output of rank r goes to LOGS-r; r is Ray's own number.
"""

import ctypes
import os
import shlex
import signal
import subprocess
import sys

import ray

SAVED = 75
AGAIN = 5


def run_rank(log, variables):
    """The rank must not outlive its actor: Ray kills the actor's process, not what it started."""
    libc = ctypes.CDLL(None)
    command = shlex.split(os.environ["PROGRAM"])
    environment = {**os.environ, **variables}
    with open(log, "ab") as out:
        die = lambda: libc.prctl(1, signal.SIGKILL)
        return subprocess.run(command, env=environment, stdout=out, stderr=out, preexec_fn=die).returncode


def train(world, logs):
    import ray.train
    from ray.train.torch import TorchTrainer

    def worker():
        rank = ray.train.get_context().get_world_rank()
        code = run_rank(f"{logs}-{rank}", {})
        if code:
            # To Ray Train this is a failure like any other.
            raise RuntimeError(f"rank {rank} ended with code {code}")

    scaling = ray.train.ScalingConfig(num_workers=world, resources_per_worker={"CPU": 1})
    failures = ray.train.FailureConfig(max_failures=AGAIN)
    storage = os.path.dirname(logs)
    config = ray.train.RunConfig(name="ranks", storage_path=storage, failure_config=failures)
    TorchTrainer(worker, scaling_config=scaling, run_config=config).fit()


def actors(world, logs):
    @ray.remote(num_cpus=1)
    class Rank:
        def run(self, rank):
            return run_rank(f"{logs}-{rank}", {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)})

    for _ in range(AGAIN):
        ranks = [Rank.remote() for _ in range(world)]
        running = {actor.run.remote(rank): rank for rank, actor in enumerate(ranks)}
        codes = []
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            rank = running.pop(done)
            try:
                codes.append(ray.get(done))
            except ray.exceptions.RayActorError:
                codes.append(-1)
            if codes[-1] not in (0, SAVED):
                print(f"rank {rank} failed: code {codes[-1]}; all ranks start again", flush=True)
                break
        for actor in ranks:
            ray.kill(actor)
        if codes == [0] * world:
            return
    sys.exit(f"no end after {AGAIN} attempts")


if __name__ == "__main__":
    kind, world, logs = sys.argv[1:]
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=os.environ["RAY_HOME"])
    {"train": train, "actors": actors}[kind](int(world), logs)
