# torchrun, with its own rendezvous on this machine.

launch_torchrun() {
    [ -x "$venv/bin/torchrun" ] || pip torch --index-url https://download.pytorch.org/whl/cpu || pip torch ||
        { skip torchrun "torch cannot be installed" && return; }
    local log="$work/torchrun.log"
    begin torchrun
    RANKS=4 background "$log" "$jobs/train-torchrun.sh"
    goes || return
    named "torchrun: 4 ranks" "$log" '\[default\([0-9]\)\]:' \
        "$(for rank in 0 1 2 3; do echo "$rank: rank $rank of 4 (local rank $rank)"; done)"
    kill -9 "$(rank RANK 2)"
    goes || return
    kill -TERM "$job"
    code_of "$job" && gone || return
    RANKS=2 background "$log" "$jobs/train-torchrun.sh"
    goes || return
    kill -USR1 "$(rank RANK 1)"
    goes || return
    kill_job
    # shellcheck disable=SC2046
    kill -9 $(ranks) 2>/dev/null || true
    gone || return
    RANKS=3 background "$log" "$jobs/train-torchrun.sh"
    goes && code_of "$job" || return
    same "torchrun: code at the end of the run" "$code" 0
    exact "torchrun: a killed rank, SIGTERM, SIGUSR1 to a rank, kill of all" "4? 4= 2= 2? 3="

    # An agent per node; the first one holds the rendezvous. Another one is killed.
    # None joins: torchrun 2.15 then sends SIGTERM to one rank, takes the code 75 of the others for a failure, and times out.
    local agents=() agent
    begin torchrun-agents
    torchrun_agent && agents+=("$job")
    wait_for 60 "the rendezvous at port 8472" torchrun_meets || return
    for agent in 1 2; do torchrun_agent && agents+=("$job"); done
    goes || return
    # shellcheck disable=SC2046
    kill -9 "${agents[2]}" $(ps -o pid= --ppid "${agents[2]}")
    wait "${agents[2]}" 2>/dev/null || true
    goes 120 || return
    for agent in "${agents[@]:0:2}"; do
        code_of "$agent" && same "torchrun: code of an agent at the end of the run" "$code" 0
    done
    exact "torchrun: an agent is killed" "3? 2="
}

torchrun_meets() { (exec 3<>/dev/tcp/127.0.0.1/8472); }
torchrun_agent() {
    NODES=2:3 RANKS=1 RDZV=localhost:8472 background "$work/torchrun-agents.log" "$jobs/train-torchrun.sh" \
        --rdzv-conf last_call_timeout=2,keep_alive_interval=1 --monitor-interval 0.5
}
