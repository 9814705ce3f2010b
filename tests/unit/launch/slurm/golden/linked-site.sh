#!/bin/bash
#SBATCH --account=physics
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --constraint=cpu
#SBATCH --cpus-per-task=1
#SBATCH --exclude=cpu4,cpu5
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-control-0f0f
#SBATCH --mem=512M
#SBATCH --nice=5
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/alice/runs/one/slurm/%j.out
#SBATCH --partition=cpu
#SBATCH --signal=B:USR2@90
#SBATCH --time=30
#SBATCH --mail-type=END
#SBATCH --hint=nomultithread

module purge
module load cuda/12
umask 077
export SUBMITIT_EXECUTOR=slurm
exec /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.entry /shared/alice/runs/one/slurm/rollmill-rm-20260101-120000-ab12-control-0f0f.pkl <<'STEPS'
srun --nodes=1 --ntasks=1 --cpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/control-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one control router=1,1-1
STEPS
