# Open MPI on this machine. mpirun ends all ranks when one has ended with another code than 0.

mpi() { # log, ranks: in the background
    # shellcheck disable=SC2086
    background "$1" mpirun --allow-run-as-root --oversubscribe --tag-output -n "$2" $PROGRAM
}

launch_mpi() {
    debian mpirun openmpi-bin || { skip mpi "Debian's openmpi-bin cannot be installed" && return; }
    local log="$work/mpi.log" found
    begin mpi
    mpi "$log" 4 && goes || return
    named "mpi: 4 ranks" "$log" '\[1,\([0-9]\)\]<stdout>:' \
        "$(for rank in 0 1 2 3; do echo "$rank: rank $rank of 4 (local rank $rank)"; done)"
    kill -9 "$(rank OMPI_COMM_WORLD_RANK 2)"
    code_of "$job" && gone && mpi "$log" 2 && goes || return
    # mpirun passes it on.
    kill -USR1 "$job"
    code_of "$job" && same "mpi: code after SIGUSR1" "$code" 75
    gone && mpi "$log" 3 && goes || return
    # One second later it kills.
    kill -TERM "$job"
    code_of "$job" && gone && mpi "$log" 3 && goes && code_of "$job" || return
    same "mpi: code at the end of the run" "$code" 0
    exact "mpi: a killed rank, SIGUSR1, SIGTERM" "4? 2= 3= 3="

    # Its daemons on the other nodes are tasks of srun, whose variables the ranks see beside those of Open MPI.
    begin mpi-slurm
    command -v slurmctld >/dev/null || { skip mpi-slurm "there is no Slurm" && return; }
    [ -n "${SLURM_CONF:-}" ] || slurm_up || { unset SLURM_CONF && skip mpi-slurm "Slurm's daemons do not start here" && return; }
    unset SLURM_LABELIO # mpirun starts its daemons with srun
    submit --nodes=2 --ntasks-per-node=2 --wrap "mpirun --allow-run-as-root --tag-output $PROGRAM" && goes || return
    found="$(sed -n 's/^\[[0-9]*,\([0-9]\)\]<stdout>:attempt 1: \(rank .*\), from .*/\1: \2/p' "$log" | sort)"
    same "mpi: mpirun in a Slurm job" "$found" "$(tasks)"
    wait_for 120 "the end of job $id" slurm_done || return
    exact "mpi: mpirun in a Slurm job" "4="
}
