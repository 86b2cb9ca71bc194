"""An offline job on a Ray cluster: parts of a plan on all nodes.

    prepare plan /data/train /data/shards --tasks 1000 --format tar --shuffle 7
    python prepare-ray.py /data/shards --cpus 4

`inspect` plans in the same way; then give --program inspect. Every node reaches the folders by the same paths. Ray starts a part
again when its worker or node dies; tasks of the plan that are done are skipped. In the end `finish` checks and merges them.
"""

import argparse
import ctypes
import signal
import subprocess
import sys

import ray


def ends_with_the_worker():
    """The program must not outlive a worker that Ray kills."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@ray.remote(max_retries=5, retry_exceptions=True)
def part(program, plan, part, parts, cpus):
    command = [program, "run", plan, "--part", f"{part}/{parts}", "--workers", str(cpus)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=ends_with_the_worker)
    if done.returncode == 75 or done.returncode < 0:
        raise RuntimeError(f"part {part} was stopped (code {done.returncode}): it runs again")
    # Another code is the result: the same input would fail again.
    return part, done.returncode, done.stdout + done.stderr


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("plan", help="plan.fdp, or its folder")
    arguments.add_argument("--program", default="prepare")
    arguments.add_argument("--cpus", type=int, default=4, help="threads of a part")
    arguments.add_argument("--parts", type=int, help="number of parts [default: 4 for each place in the cluster]")
    args = arguments.parse_args()
    ray.init()
    places = max(1, int(ray.cluster_resources()["CPU"]) // args.cpus)
    parts = args.parts or 4 * places
    running = [part.options(num_cpus=args.cpus).remote(args.program, args.plan, k, parts, args.cpus) for k in range(parts)]
    while running:
        (first,), running = ray.wait(running)
        number, code, text = ray.get(first)
        if code:
            print(f"part {number}: code {code}\n{text}", file=sys.stderr)
    sys.exit(subprocess.run([args.program, "finish", args.plan]).returncode)


if __name__ == "__main__":
    main()
