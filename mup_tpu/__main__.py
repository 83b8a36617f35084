"""`python -m mup_tpu` is `mup-tpu`."""

from mup_tpu.files.local import leave_working_folder

leave_working_folder()

from mup_tpu.cli import main  # noqa: E402 (the working folder may hold a module of any name)

main()
