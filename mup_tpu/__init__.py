"""mup_tpu: tune GPT-2 narrow, check that the optimum transfers, train wide once."""

__version__ = "0.1.0"
