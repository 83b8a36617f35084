#!/bin/bash
#SBATCH --array=0-7
#SBATCH --time=02:00:00
# One trial of a study for each task of a job array:
#
#   sbatch --array=0-31 examples/slurm.sh study.toml
#
# Tasks that find nothing missing end at once. A task that is killed tells nothing, and its trial is given again
# after 2 hours. With --until-settled the trials that decide are given.
set -uo pipefail
declare $(mup-tpu ask "$1" 1 --patience 2h)  # id, and the names of the study
[ -n "${id:-}" ] || exit 0
if loss=$(python train.py --width "$width" --lr "$learning_rate" --steps "$steps" --seed "$seed" | tail -n 1); then
    mup-tpu tell "$1" "$id" "$loss"
else
    mup-tpu tell "$1" "$id" --failed "train.py ended with exit code $?"
fi
