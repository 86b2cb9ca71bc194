# An indexed job of Kubernetes, without a cluster.

pods() { # ranks: in the background
    background "$work/k8s.log" "$venv/bin/python" "$parts/indexed_job.py" "$jobs/train-k8s.yaml" "$1" "$work/k8s"
}

launch_kubernetes() {
    pip pyyaml || { skip kubernetes "PyYAML cannot be installed" && return; }
    local index found
    begin kubernetes
    pods 4 && goes || return
    found="$(for index in 0 1 2 3; do sed -n "s/^attempt 1: \(.*\), from .*/$index: \1/p" "$work/k8s-$index"; done)"
    same "kubernetes: 4 indexes" "$found" "$(for index in 0 1 2 3; do echo "$index: rank $index of 4"; done)"
    kill -9 "$(rank JOB_COMPLETION_INDEX 2)" && goes || return
    # Eviction of all pods, of one pod, and the end of the job.
    kill -USR1 "$job" && goes || return
    kill -TERM "$(rank JOB_COMPLETION_INDEX 1)" && goes || return
    kill -TERM "$job"
    code_of "$job" && gone && pods 2 && goes || return
    kill_job && gone && pods 3 && goes && code_of "$job" || return
    same "kubernetes: code at the end of the run" "$code" 0
    same "kubernetes: codes that count against the limit of an index" \
        "$(sed -n 's/.*: code \(.*\)/\1/p' "$work/k8s.log" | sort -nu)" "$(printf '%s\n' "1: Count" "75: Ignore" "137: Count")"
    exact "kubernetes: a killed index, eviction of all and of one, deletion, kill of all" "4? 4= 4= 4= 2? 3="
}
