"""mup_tpu: tune small, check that the optimum transfers, train large once."""

__version__ = "0.1.0"
