"""Sweeps, sequences and searches: which trials run, and what becomes of them."""

import mup_tpu.jobs  # noqa: F401 (before ray: it tells Ray how to authenticate)
