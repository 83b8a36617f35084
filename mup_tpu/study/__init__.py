"""Studies: anyone's training function, with the scheduler, store and verdict of sweeps."""

from mup_tpu.study.report import Report
from mup_tpu.study.space import Space, Trial, octaves
from mup_tpu.study.study import Study

__all__ = ["Report", "Space", "Study", "Trial", "octaves"]
