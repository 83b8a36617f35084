"""Sweeps, sequences and searches: they choose trials, run them as jobs, and store their rows."""

import mup_tpu.jobs  # noqa: F401 (before ray: it tells Ray how to authenticate)
