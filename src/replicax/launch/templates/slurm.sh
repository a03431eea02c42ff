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
# SIGTERM 120 seconds before the time is up: save and stop.
#SBATCH --signal=TERM@120
#end
#if restarts
# After the loss of a node, start again on others.
#SBATCH --requeue
#SBATCH --open-mode=append
#end

#if devices
# Simulated devices of each process, where it runs on CPUs.
export JAX_NUM_CPU_DEVICES={{devices}}

#end
#if restarts
restarts={{restarts}}
for ((attempt = 0; attempt <= restarts; attempt++)); do
    code=0
    # Each process finds its place, and process 0, in what srun sets.
    # One that fails tells the others; --kill-on-bad-exit=1 would take 75 for a
    # failure too, and cut off those that still save.
    srun --kill-on-bad-exit=0 --wait=60 --label{{srun-cpus}} \
    {{command}} || code=$?
    case $code in
        # Done, or a wrong flag, which starting again does not mend.
        0 | 2) break ;;
        # Stopped early with everything saved: go on in a new allocation.
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
# Each process finds its place, and process 0, in what srun sets.
# One that fails tells the others; --kill-on-bad-exit=1 would take 75 for a
# failure too, and cut off those that still save.
srun --kill-on-bad-exit=0 --wait=60 --label{{srun-cpus}} \
    {{command}}
#end
