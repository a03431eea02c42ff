#!/bin/bash
# {{islands}} of {{processes}} on {{hosts}} each; submit with sbatch.
# Each island is a task of a job array, which Slurm starts, requeues and ends
# alone; submit it from a folder that all nodes share.
#SBATCH --job-name={{job-name}}
#SBATCH --array=0-{{last-island}}
#if partition
#SBATCH --partition={{partition}}
#end
#if account
#SBATCH --account={{account}}
#end
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{ntasks-per-node}}
#if gpus-per-node
#SBATCH --gpus-per-node={{gpus-per-node}}
#end
#if cpus-per-task
#SBATCH --cpus-per-task={{cpus-per-task}}
#end
#if time
#SBATCH --time={{time}}
#end
#SBATCH --output={{output}}
#if time
# SIGTERM 120 seconds before the time limit: save and stop.
#SBATCH --signal=TERM@120
#end
# If a node fails, its island restarts on others.
#SBATCH --requeue
#SBATCH --open-mode=append

islands={{island-count}} restarts={{restarts}}
island=$SLURM_ARRAY_TASK_ID
export REPLICAX_ISLAND=$island REPLICAX_JOB_ID=$SLURM_ARRAY_JOB_ID
shared=$PWD/islands-$SLURM_ARRAY_JOB_ID
mkdir -p -m 700 "$shared" || exit

# Another island is done: nothing is left to do after a restart.
[ -e "$shared/done" ] && exit 0

# One secret for all, that of whoever links it first, in a file of mode 600.
own=$(umask 077 && mktemp "$shared/secret.XXXXXX") &&
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$own" || exit
ln "$own" "$shared/secret" 2>/dev/null
rm -f "$own"
[ -s "$shared/secret" ] || exit
unset REPLICAX_SECRET
export REPLICAX_SECRET_FILE=$shared/secret

# The address of each island is a file. Its host may change when it is requeued;
# its port, which follows from the job, does not.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + (SLURM_ARRAY_JOB_ID * 131 + island) % 12000))
echo "$host:$port" >"$shared/.island-$island" &&
    mv "$shared/.island-$island" "$shared/island-$island" || exit
files=()
for ((other = 0; other < islands; other++)); do
    files+=("$shared/island-$other")
    # Only the first time: all have an address once they have had a node.
    until [ -e "$shared/island-$other" ]; do sleep 1; done
done

#if devices
# Simulated devices per process, when it runs on CPUs.
export JAX_NUM_CPU_DEVICES={{devices}}

#end
early=0
while :; do
    REPLICAX_ISLANDS=$(paste -d, "${files[@]}")
    export REPLICAX_ISLANDS
    code=0 began=$SECONDS
    # Each process reads its rank and process 0's host from srun's variables.
    # One that fails notifies the others; --kill-on-bad-exit=1 would also treat
    # exit code 75 as a failure, and kill processes that are still saving.
    srun --kill-on-bad-exit=0 --wait=60 --label{{srun-cpus}} \
    {{command}} || code=$?
    lived=$((SECONDS - began))
    [ "$code" = 0 ] && touch "$shared/done"
    # A wrong flag (2) is not fixed by a restart.
    if ((code == 0 || code == 2)) || [ -e "$shared/done" ]; then break; fi
    # Stopped early with everything saved: resume in a new allocation.
    if [ "$code" = 75 ]; then
        if ((lived >= 60 || ${SLURM_RESTART_COUNT:-0} < restarts)); then
            # The ID of the last task alone would stand for all of them.
            scontrol requeue "${SLURM_ARRAY_JOB_ID}_$island"
        fi
        break
    fi
    early=$((lived < 60 ? early + 1 : 0))
    echo "island $island: exit code $code after $lived s, $early in a row" >&2
    if ((early > restarts)); then break; fi
    sleep $((early < 5 ? early : 5))
done
# If another island is done, the work is.
[ -e "$shared/done" ] && exit 0
exit "$code"
