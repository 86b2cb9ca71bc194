#!/bin/bash
# A training job of torchrun:  NODES=2 RDZV=first-host:29400 train-torchrun.sh, on every node; on one node without both
#
# Adapt RANKS (processes per node), RESTARTS and PROGRAM. Arguments are further options of torchrun. With NODES=2:4 the run goes
# on with the nodes that are left when one dies; the first one holds the rendezvous and must stay.
#
# torchrun starts PROGRAM RANKS times per node. When a rank fails, it starts all ranks again, at most RESTARTS times, and they go
# on from the saved state. SIGTERM to torchrun reaches the ranks: they save their state and exit with code 75 within 30 s, and
# torchrun ends with code 1. Run the job again to go on, with any number of ranks. Its code is 0 when the run is finished.
#
# SIGUSR1 and SIGKILL end torchrun and leave its ranks behind, which go on training: send SIGTERM (in Slurm --signal=TERM@120), and
# end such ranks before the run starts again.
PROGRAM="${PROGRAM:-./resume --join ./run}"

exec "${TORCHRUN:-torchrun}" --nnodes "${NODES:-1}" --nproc-per-node "${RANKS:-4}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "${RDZV:-localhost:0}" --rdzv-id train --tee 3 "$@" --no-python $PROGRAM
