"""Files and folders, local or in a bucket: each file is whole or missing; what a kill leaves is removed."""

from mup_tpu.files.folder import MIN_RATE, Folder, as_oserror, cache_root, file_system, patiently
from mup_tpu.files.local import check_names, checksum, open_own, read_regular, short_hash

__all__ = [
    "MIN_RATE", "Folder", "as_oserror", "cache_root", "check_names", "checksum", "file_system", "open_own",
    "patiently", "read_regular", "short_hash",
]  # fmt: skip
