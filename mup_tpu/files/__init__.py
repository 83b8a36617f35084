"""Files and folders, local or in a bucket: each file is whole or missing."""

from mup_tpu.files.folder import MIN_RATE, Folder, as_oserror, cache_root, file_system, patiently
from mup_tpu.files.local import checksum, read_local, short_hash

__all__ = [
    "MIN_RATE", "Folder", "as_oserror", "cache_root", "checksum", "file_system", "patiently", "read_local",
    "short_hash",
]  # fmt: skip
