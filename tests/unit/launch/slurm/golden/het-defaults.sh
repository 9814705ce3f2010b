#!/bin/bash
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=1
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/alice/runs/one/slurm/%j.out
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH hetjob
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=1
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH hetjob
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=1
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH hetjob
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=1
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH hetjob
#SBATCH --comment=rm-20260101-120000-ab12
#SBATCH --cpus-per-task=1
#SBATCH --job-name=rollmill-rm-20260101-120000-ab12-het-0f0f
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue

umask 077
export SUBMITIT_EXECUTOR=slurm
exec /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.entry /shared/alice/runs/one/slurm/rollmill-rm-20260101-120000-ab12-het-0f0f.pkl <<'STEPS'
srun --het-group=0 --nodes=1 --ntasks=1 --cpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/control-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one control router=1,1-1
srun --het-group=1 --nodes=1 --ntasks=1 --cpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/init-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one init init=1,1-1
srun --het-group=2 --nodes=1 --ntasks=1 --cpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/run-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one run run=1,1-1
srun --het-group=3 --nodes=1 --ntasks=1 --cpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/eval-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one eval eval=1,1-1
srun --het-group=4 --nodes=1 --ntasks=1 --cpus-per-task=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --open-mode=append --output=/shared/alice/runs/one/logs/attempt_$ROLLMILL_ATTEMPT/fleet-node%n.log /shared/rollmill/.venv/bin/python -P -u -m launch.slurm.step /shared/alice/runs/one fleet replica=1,1-1
STEPS
