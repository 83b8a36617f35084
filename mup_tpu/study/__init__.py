"""Studies: anyone's training function, with the scheduler, store and verdict of sweeps."""
