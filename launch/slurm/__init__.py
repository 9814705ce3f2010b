"""Slurm: what a run asks of it, how that is written, submitted, led and watched."""
