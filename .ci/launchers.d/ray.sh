# Ray on this machine: Ray Train, and plain actors.

ray_ranks() { # train|actors, ranks: in the background
    background "$work/ray.log" "$venv/bin/python" "$parts/ranks.py" "$1" "$2" "$work/ray-$1"
}
ray_actor() { ps -o ppid= -p "$(rank RANK "$1")"; }
# Ray's daemons end when the driver ends.
ray_killed() {
    kill_job && gone || return
    wait_for 60 "the end of Ray's daemons" ray_is_gone
}
ray_is_gone() { ! pgrep -f "$RAY_HOME" >/dev/null; }

launch_ray() {
    pip 'ray[train]' || { skip ray "it cannot be installed" && return; }
    export RAY_HOME="$work/ray" RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0
    begin ray
    if "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        ray_ranks train 4 && goes 120 || return
        same "ray: 4 workers of Ray Train" "$(cat "$work"/ray-train-? | sed -n 's/, from .*//p')" \
            "$(for rank in 0 1 2 3; do echo "attempt 1: rank $rank of 4 (local rank $rank)"; done)"
    else
        skip ray-train "torch cannot be installed"
        ray_ranks actors 4 && goes 120 || return
    fi
    # shellcheck disable=SC2046
    kill -9 $(ray_actor 2) && goes 120 || return
    kill -USR1 "$(rank RANK 1)" && goes 120 || return
    ray_killed && ray_ranks actors 2 && goes 120 || return
    # shellcheck disable=SC2046
    kill -9 $(ray_actor 1) && goes 120 || return
    kill -USR1 "$(rank RANK 0)" && goes 120 || return
    ray_killed && ray_ranks actors 3 && goes 120 && code_of "$job" || return
    same "ray: code at the end of the run" "$code" 0
    exact "ray: killed actors, SIGUSR1 to a rank, kill of all" "4? 4= 4? 2? 2= 2? 3="
}
