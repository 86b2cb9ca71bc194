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
    kill -9 -- "-$job"
    # shellcheck disable=SC2046
    kill -9 $(ranks) 2>/dev/null || true
    gone || return
    RANKS=3 background "$log" "$jobs/train-torchrun.sh"
    goes && code_of "$job" || return
    same "torchrun: code at the end of the run" "$code" 0
    exact "torchrun: a killed rank, SIGTERM, SIGUSR1 to a rank, kill of all" "4? 4= 2= 2? 3="
}
