"""Files and folders, local or in a bucket: each file whole or not there, and what killed processes leave."""

from mup_tpu.files.folder import (
    MIN_RATE,
    Folder,
    as_oserror,
    cache_root,
    checksum,
    file_system,
    open_own,
    patiently,
    read_regular,
)

__all__ = [
    "MIN_RATE",
    "Folder",
    "as_oserror",
    "cache_root",
    "checksum",
    "file_system",
    "open_own",
    "patiently",
    "read_regular",
]
