"""`python -m mup_tpu` is `mup-tpu`."""

from mup_tpu.cli import main

main()
