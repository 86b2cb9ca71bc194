# Slurm on this machine: a controller and three nodes, without accounts and without control groups.

slurm_up() {
    local home="$work/slurm" host node
    host="$(hostname -s)"
    mkdir -p "$home"/{state,n1,n2,n3}
    export SLURM_CONF="$home/slurm.conf"
    cat >"$SLURM_CONF" <<SLURM
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldPort=6917
SlurmctldPidFile=$home/ctld.pid
SlurmdPidFile=$home/%n.pid
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/%n
SlurmctldLogFile=$home/ctld.log
SlurmdLogFile=$home/%n.log
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
KillWait=30
MinJobAge=300
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=1,sched_min_interval=0
JobRequeue=1
NodeName=n[1-3] NodeHostname=$host NodeAddr=127.0.0.1 Port=[6921-6923] CPUs=4 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
SLURM
    slurmctld -D >"$home/ctld.out" 2>&1 &
    pids+=($!)
    wait_for 30 "slurmctld: see $home/ctld.log" scontrol ping || return
    for node in n1 n2 n3; do slurm_node "$node"; done
    wait_for 60 "three idle nodes of Slurm" slurm_idle
}
slurm_node() { # name; its daemon in a group of its own
    setsid slurmd -D -N "$1" >>"$work/slurm/$1.out" 2>&1 &
    groups+=($!)
    eval "slurmd_$1=$!"
}
slurm_idle() { [ "$(sinfo -h -t idle -o %D)" = 3 ]; }
slurm_is() { [[ $(scontrol -o show job "$1") == *" JobState=$2 "* ]]; } # job, state
submit() { # arguments of sbatch, file: sets id
    id="$(sbatch --parsable --output="$work/slurm-%j.log" "$@")" || return
    log="$work/slurm-$id.log"
}
# Slurm starts a requeued job after two minutes. Two seconds will do; in the same second a node takes it for the old one.
again() {
    wait_for 90 "job $id to be in the queue again" slurm_is "$id" PENDING || return
    scontrol update JobId="$id" StartTime=now+2
}

launch_slurm() {
    [ "$(id -u)" = 0 ] || { skip slurm "its daemons need root" && return; }
    debian slurmctld slurm-wlm || { skip slurm "Debian's slurm-wlm cannot be installed" && return; }
    slurm_up || { tail -3 "$work/slurm"/*.log && bad "slurm: its daemons do not start" && return; }
    slurm_runs
}

tasks() { # two on each of two nodes
    printf '%s\n' '0: rank 0 of 4 (local rank 0)' '1: rank 1 of 4 (local rank 1)' \
        '2: rank 2 of 4 (local rank 0)' '3: rank 3 of 4 (local rank 1)'
}

slurm_runs() {
    # Lines of tasks begin with the number that srun gives them.
    export SLURM_LABELIO=1
    begin slurm
    submit "$jobs/train.sbatch" && goes || return
    named "slurm: 2 tasks on each of 2 nodes" "$log" '\([0-9]*\): ' "$(tasks)"
    scancel --signal=USR1 "$id" && again && goes || return
    kill -9 "$(rank SLURM_PROCID 2)"
    wait_for 60 "job $id to fail" slurm_is "$id" FAILED || return
    submit --nodes=1 "$jobs/train.sbatch" && goes || return
    scontrol requeue "$id" && again && goes || return
    scancel "$id"
    wait_for 60 "the end of job $id" slurm_is "$id" CANCELLED && gone || return
    # The notice of 55 s before a limit of 60 s. Slurm looks at time limits every 30 s: steps are slow, so that it comes in time.
    PROGRAM+=" --step-ms 150"
    submit --nodes=3 --ntasks-per-node=1 --time=1 --signal=USR1@55 "$jobs/train.sbatch" && goes && again && goes || return
    wait_for 120 "the end of job $id" slurm_done || return
    exact "slurm: scancel --signal, a killed task, requeue, scancel, the notice before the limit" "4= 4? 2= 2= 3= 3=*"

    begin slurm-node
    submit --ntasks-per-node=1 "$jobs/train.sbatch" && goes || return
    slurm_dies n2 && again && slurm_node n2 && goes || return
    wait_for 120 "the end of job $id" slurm_done || return
    exact "slurm: a dead node" "2? 2="

    begin slurm-torchrun
    [ -x "$venv/bin/torchrun" ] || { skip slurm-torchrun "there is no torchrun" && return; }
    NODES=2 RANKS=2 RDZV=localhost:8471 submit --nodes=2 --ntasks-per-node=1 --wrap "srun $jobs/train-torchrun.sh" || return
    goes || return
    same "slurm: srun that starts torchrun on 2 nodes" "$(sed -n 's/.*: \(rank .*\), from .*/\1/p' "$log" | sort)" \
        "$(tasks | sed 's/^.: //')"
    wait_for 120 "the end of job $id" slurm_done || return
    exact "slurm: srun that starts torchrun" "4="

    begin slurm-pmi
    submit --nodes=2 --ntasks-per-node=2 --wrap "srun --mpi=pmi2 $PROGRAM" && goes || return
    same "slurm: PMI's variables beside those of Slurm" "$(tr '\0' '\n' <"/proc/$(rank SLURM_PROCID 2)/environ" |
        grep -E '^PMI_(RANK|SIZE)=' | sort)" "$(printf '%s\n' PMI_RANK=2 PMI_SIZE=4)"
    named "slurm: tasks with PMI" "$log" '\([0-9]*\): ' "$(tasks)"
    scancel "$id"
    gone || return

    begin slurm-forgotten
    submit --wrap "$PROGRAM" --ntasks=2 || return
    wait_for 60 "job $id to fail" slurm_is "$id" FAILED || return
    if grep -q "SLURM_NTASKS=2, but srun did not start this process" "$log"; then
        good "slurm: a batch script that forgets srun is refused by name"
    else
        bad "slurm: a batch script that forgets srun: $(tail -1 "$log")"
    fi
}
# A job that stopped itself may be back in the queue.
hastened=""
slurm_done() {
    local now
    now="$id $(scontrol -o show job "$id" | grep -o 'Restarts=[0-9]*')"
    # Once: every call would put it off.
    if slurm_is "$id" PENDING && [ "$now" != "$hastened" ]; then
        again && hastened="$now"
    fi
    slurm_is "$id" COMPLETED
}
slurm_dies() { # node: its daemon, its step and its task
    local task step daemon="slurmd_$1"
    task="$(rank SLURMD_NODENAME "$1")" && step="$(ps -o ppid= -p "$task")" || return
    kill -9 "${!daemon}" "$step" "$task"
}
