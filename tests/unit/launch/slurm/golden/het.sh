#!/bin/bash
#SBATCH --account=physics
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=1
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --mem=512M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/alice/runs/one/slurm/%j.out
#SBATCH --partition=cpu
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --time=30
#SBATCH hetjob
#SBATCH --account=physics
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=2
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --mem=512M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=cpu
#SBATCH --requeue
#SBATCH --time=30
#SBATCH hetjob
#SBATCH --account=physics
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=4
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --mem=2048M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=cpu
#SBATCH --requeue
#SBATCH --time=30
#SBATCH hetjob
#SBATCH --account=physics
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=1
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --mem=308M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=cpu
#SBATCH --requeue
#SBATCH --time=30
#SBATCH hetjob
#SBATCH --account=physics
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=2
#SBATCH --gres=gpu:2
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --mem=2048M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --time=30

umask 077
export SUBMITIT_EXECUTOR=slurm
exec /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.entry /shared/alice/runs/one/slurm/rollmill-rm-20260101-120000-ab12-het-0f0f.pkl <<'STEPS'
srun --het-group=0 --nodes=1 --ntasks=1 --cpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/control-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one control router=1,1-1
srun --het-group=1 --nodes=1 --ntasks=1 --cpus-per-task=2 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/init-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one init init=2,1-2
srun --het-group=2 --nodes=2 --ntasks=2 --cpus-per-task=4 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/run-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one run run=2,1-4
srun --het-group=3 --nodes=1 --ntasks=1 --cpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/eval-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one eval eval=1,1-1
srun --het-group=4 --nodes=2 --ntasks=2 --cpus-per-task=2 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/fleet-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one fleet replica=2,1-3
STEPS
