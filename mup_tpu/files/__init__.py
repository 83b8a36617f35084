"""Files and folders, local or in a bucket: each file is whole or missing."""

from mup_tpu.files.folder import MIN_RATE, Folder, as_oserror, cache_root, file_system, patiently
from mup_tpu.files.local import (
    MOST_BYTES,
    MOST_BYTES_OF_CONFIG,
    bounded,
    checksum,
    read_local,
    require_size,
    short_hash,
)

__all__ = [
    "MIN_RATE", "MOST_BYTES", "MOST_BYTES_OF_CONFIG", "Folder", "as_oserror", "bounded", "cache_root",
    "checksum", "file_system", "patiently", "read_local", "require_size", "short_hash",
]  # fmt: skip
