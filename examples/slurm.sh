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
trial=$(mup-tpu ask "$1" 1 --patience 2h --json)
[ -n "$trial" ] || exit 0
value() {  # of a name of the study, or "id", as it is: no shell reads it
    python -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]])' "$trial" "$1"
}
id=$(value id)
if loss=$(python train.py --width "$(value width)" --lr "$(value learning_rate)" --steps "$(value steps)" \
        --seed "$(value seed)" | tail -n 1); then
    mup-tpu tell "$1" "$id" "$loss"
else
    mup-tpu tell "$1" "$id" --failed "train.py ended with exit code $?"
fi
