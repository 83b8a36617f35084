"""Files and folders, local or in a bucket: each file whole or not there; leftovers of killed processes."""

from mup_tpu.files.folder import MIN_RATE, Folder, cache_root
from mup_tpu.files.local import checksum, open_own, read_regular, short_hash
from mup_tpu.files.remote import as_oserror, file_system, patiently

__all__ = [
    "MIN_RATE", "Folder", "as_oserror", "cache_root", "checksum", "file_system", "open_own", "patiently",
    "read_regular", "short_hash",
]  # fmt: skip
