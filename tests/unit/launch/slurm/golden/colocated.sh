#!/bin/bash
#SBATCH --account=physics
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:2
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-colocated-0f0f
#SBATCH --mem=4404M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/alice/runs/one/slurm/%j.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --time=30

umask 077
export SUBMITIT_EXECUTOR=slurm
exec /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.entry /shared/alice/runs/one/slurm/rollmill-rm-20260101-120000-ab12-colocated-0f0f.pkl <<'STEPS'
srun --nodes=1 --ntasks=1 --cpus-per-task=8 --overlap --gres=none --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/control-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one control router=1,1-1
srun --nodes=2 --ntasks=2 --cpus-per-task=8 --overlap --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/all-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one all init=2,1-4 run=1,1-2 eval=1,1-2 replica=2,1-3
STEPS
