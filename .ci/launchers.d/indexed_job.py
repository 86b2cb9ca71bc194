"""Runs an indexed job as Kubernetes does: indexed_job.py FILE RANKS LOGS. The output of index i goes to LOGS-i.

Each pod is a process with the command and the variables of the file, and no others. SIGUSR1 evicts all pods, SIGTERM deletes the
job; both give the pods SIGTERM and their grace period. Of a cluster this is the rules for failed pods, no scheduler, no network.
"""

import os
import signal
import subprocess
import sys
import time

import yaml


def edited(path, ranks):
    """The job with this number of ranks, as a user edits it."""
    with open(path) as file:
        jobs = [part for part in yaml.safe_load_all(file) if part["kind"] == "Job"]
    (job,) = jobs
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    numbers = {"completions": spec["completions"], "parallelism": spec["parallelism"], "WORLD_SIZE": variables["WORLD_SIZE"]}
    if len({str(number) for number in numbers.values()}) > 1 or not isinstance(variables["WORLD_SIZE"], str):
        sys.exit(f"{path}: the number of ranks differs: {numbers}; set the three to the same, WORLD_SIZE in quotes")
    if spec["completionMode"] != "Indexed" or spec["template"]["spec"]["restartPolicy"] != "Never":
        sys.exit(f"{path}: needs completionMode: Indexed and, for a podFailurePolicy, restartPolicy: Never")
    spec["completions"] = spec["parallelism"] = ranks
    # What only a cluster has: the image's program and the names of pods.
    variables |= {"WORLD_SIZE": str(ranks), "PROGRAM": os.environ["PROGRAM"], "MASTER_ADDR": "127.0.0.1"}
    return spec, container, variables


class Job:
    def __init__(self, path, ranks, logs):
        self.spec, self.container, self.variables = edited(path, ranks)
        self.logs = logs
        self.pods = {index: self.start(index) for index in range(ranks)}
        self.failures = dict.fromkeys(range(ranks), 0)
        self.evicted = set()
        self.deleted = False

    def start(self, index):
        variables = {"PATH": os.environ["PATH"], **self.variables, "JOB_COMPLETION_INDEX": str(index)}
        with open(f"{self.logs}-{index}", "ab") as out:
            return subprocess.Popen(self.container["command"], env=variables, stdout=out, stderr=out)

    def evict(self, *_):
        for index, pod in self.pods.items():
            if pod.poll() is None:
                self.evicted.add(pod.pid)
                pod.terminate()

    def delete(self, *_):
        self.deleted = True

    def action(self, pod, code):
        """Of the first rule that matches; Count without one."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes and codes["containerName"] == self.container["name"] and codes["operator"] == "In":
                if code in codes["values"]:
                    return rule["action"]
            for condition in rule.get("onPodConditions", []):
                if condition["type"] == "DisruptionTarget" and pod.pid in self.evicted:
                    return rule["action"]
        return "Count"

    def end(self, code):
        grace = self.spec["template"]["spec"]["terminationGracePeriodSeconds"]
        self.evict()
        until = time.monotonic() + grace
        for index, pod in self.pods.items():
            try:
                pod.wait(max(0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"index {index}: its grace period of {grace} s is over", flush=True)
                pod.kill()
        sys.exit(code)

    def run(self):
        done = set()
        while len(done) < len(self.pods):
            time.sleep(0.05)
            if self.deleted:
                self.end(143)
            for index, pod in self.pods.items():
                code = pod.poll()
                if code is None or index in done:
                    continue
                if code == 0:
                    done.add(index)
                    continue
                code = code if code > 0 else 128 - code
                action = self.action(pod, code)
                print(f"index {index}: code {code}: {action}", flush=True)
                if action == "Count":
                    self.failures[index] += 1
                if action == "FailJob" or self.failures[index] > self.spec["backoffLimitPerIndex"]:
                    self.end(1)
                self.pods[index] = self.start(index)


if __name__ == "__main__":
    job = Job(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    signal.signal(signal.SIGUSR1, job.evict)
    signal.signal(signal.SIGTERM, job.delete)
    job.run()
