# An offline job: 1,000 tasks of `prepare` under Slurm, Ray and an indexed job, with kills, against one process.

offline_data() { # sets pictures; the output of one process is in $work/offline-one
    pictures="$work/pictures"
    pip pillow numpy || return
    "$venv/bin/python" "$parts/pictures.py" "$pictures" "${FEEDLINE_TASKS:-1000}" || return
    prepare=${FEEDLINE_PREPARE:-}
    if [ -z "$prepare" ]; then
        cargo build --locked --release --example prepare || return
        prepare="$(dirname "$resume")/prepare"
    fi
    planned offline-one && "$prepare" run "$out" >/dev/null && "$prepare" finish "$out" >/dev/null
}
planned() { # name: a new plan; sets out
    out="$work/$1"
    "$prepare" plan "$pictures" "$out" --tasks "${FEEDLINE_TASKS:-1000}" --format tar --shuffle 7 --skip-damaged >/dev/null
}
offline_same() { # what: the output equals that of one process, and `finish` says so
    local text
    text="$("$prepare" finish "$out" 2>&1)" || { bad "$1: finish: $text" && return; }
    same "$1: bytes of shards, lists and records" "$(cd "$out" && sums)" "$(cd "$work/offline-one" && sums)"
}
sums() { find . -name '*.tar' -o -name '*.tsv' -o -name plan.fdp | sort | xargs sha256sum | sha256sum; }
once() { # what, logs…: no task was done twice
    same "$1: no task is done twice" "$(cat "${@:2}" | sed -n 's/^done *task //p' | sort -n | uniq -d)" ""
}
programs() { # processes of the job
    local pid
    for pid in $(pgrep -f -- "run $out"); do
        [ "$(readlink "/proc/$pid/exe")" != "$(readlink -f "$prepare")" ] || echo "$pid"
    done
}
# Kills a random process of the job, or asks it to stop, again and again.
killer() { # seconds between
    local pid
    while sleep "$1"; do
        pid="$(programs | shuf -n 1)"
        [ -n "$pid" ] || continue
        [ $((RANDOM % 3)) = 0 ] && kill -USR1 "$pid" || kill -9 "$pid"
    done 2>/dev/null
}

launch_offline() {
    offline_data || { bad "offline: the data or one process fails" && return; }
    if [ -n "${SLURM_CONF:-}" ] || { [ "$(id -u)" = 0 ] && debian slurmctld slurm-wlm && slurm_up; }; then
        offline_slurm
    else
        unset SLURM_CONF
        skip offline-slurm "Slurm cannot be had, or its daemons do not start here"
    fi
    if "$venv/bin/python" -c 'import ray' 2>/dev/null; then offline_ray; else skip offline-ray "Ray is not installed"; fi
    if pip pyyaml; then offline_pods; else skip offline-kubernetes "PyYAML cannot be installed"; fi
}

offline_slurm() {
    planned offline-slurm || return
    local tasks="0-$((${FEEDLINE_TASKS:-1000} - 1))" rounds=0 hits
    export PROGRAM="$parts/chaos $prepare"
    # As a user does: submit what finish names, until it is satisfied.
    while [ -n "$tasks" ] && [ $((rounds += 1)) -le 20 ]; do
        sbatch --parsable --array="$tasks" --cpus-per-task=1 --output="$work/offline-%a.log" "$jobs/prepare.sbatch" "$out" >/dev/null || return
        wait_for 300 "the array of round $rounds" offline_idle || return
        tasks="$("$prepare" finish "$out" 2>/dev/null | sed -n 's/^missing *--array=//p')" || true
    done
    hits="$(grep -c 'WEXITSTATUS 137' "$work/slurm/ctld.log") killed, $(cat "$work"/offline-[0-9]*.log | grep -c ^stopped) stopped,"
    hits+=" $(cat "$work"/offline-[0-9]*.log | grep -c ^requeued) requeued"
    [ "$rounds" -gt 1 ] || bad "offline-slurm: no kill hit a task"
    offline_same "offline: an array of Slurm, $rounds rounds, $hits"
    once "offline: an array of Slurm" "$work"/offline-*.log
}
offline_idle() {
    local id
    # Slurm starts a requeued element after two minutes; see `again`.
    for id in $(squeue -h -t PD -o '%i %r' | sed -n 's/ BeginTime$//p'); do scontrol update JobId="$id" StartTime=now || true; done
    [ -z "$(squeue -h -o %i)" ]
}

offline_ray() {
    planned offline-ray || return
    export RAY_USAGE_STATS_ENABLED=0
    background "$work/offline-ray.log" "$venv/bin/python" "$jobs/prepare-ray.py" "$out" --program "$prepare" --cpus 1 --parts 12
    wait_for 120 "a part of Ray" some_program || return
    # A worker of Ray, and programs in others.
    kill -9 "$(ps -o ppid= -p "$(programs | head -1)" | tr -d ' ')"
    killer 0.5 &
    local killers=$!
    sleep 3
    kill "$killers" 2>/dev/null || true
    code_of "$job"
    same "offline: code of the script for Ray" "$code" 0
    offline_same "offline: Ray with a killed worker"
}
some_program() { [ -n "$(programs)" ]; }

offline_pods() {
    planned offline-pods || return
    PROGRAM="$prepare run $out" background "$work/offline-pods.log" \
        "$venv/bin/python" "$parts/indexed_job.py" "$jobs/prepare-k8s.yaml" 3 "$work/offline-pod"
    wait_for 60 "a pod" some_program || return
    kill -USR1 "$job"
    sleep 0.5
    kill -9 "$(programs | head -1)" 2>/dev/null || true
    code_of "$job"
    same "offline: code of the indexed job" "$code" 0
    offline_same "offline: an indexed job, evicted, with a killed pod"
    once "offline: an indexed job" "$work"/offline-pod-?
}
