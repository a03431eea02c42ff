#!/bin/bash
# {{processes}} on {{hosts}}; submit with sbatch.
#SBATCH --job-name={{job-name}}
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
#if restarts
# If a node fails, restart on others.
#SBATCH --requeue
#SBATCH --open-mode=append
#end

# Keeps the processes of other users out of the job; srun passes it on.
REPLICAX_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export REPLICAX_SECRET
unset REPLICAX_SECRET_FILE

#if devices
# Simulated devices per process, when it runs on CPUs.
export JAX_NUM_CPU_DEVICES={{devices}}

#end
#if restarts
restarts={{restarts}}
for ((attempt = 0; attempt <= restarts; attempt++)); do
    code=0
    # Each process reads its rank and process 0's host from srun's variables.
    # One that fails notifies the others; --kill-on-bad-exit=1 would also treat
    # exit code 75 as a failure, and kill processes that are still saving.
    srun --kill-on-bad-exit=0 --wait=60 --label{{srun-cpus}} \
    {{command}} || code=$?
    case $code in
        # Done, or an invalid flag, which a restart does not fix.
        0 | 2) break ;;
        # Stopped early with everything saved: resume in a new allocation.
        75)
            if ((${SLURM_RESTART_COUNT:-0} < restarts)); then
                scontrol requeue "$SLURM_JOB_ID"
            fi
            break ;;
    esac
    echo "attempt $((attempt + 1)) of $((restarts + 1)): exit code $code" >&2
done
exit "$code"
#else
# Each process reads its rank and process 0's host from srun's variables.
# One that fails notifies the others; --kill-on-bad-exit=1 would also treat
# exit code 75 as a failure, and kill processes that are still saving.
srun --kill-on-bad-exit=0 --wait=60 --label{{srun-cpus}} \
    {{command}}
#end
