"""Jobs: what runs in workers, and the workers, on this machine or on a Ray cluster."""

import os
from pathlib import Path

# Ray 2.60 starts clusters with token authentication where this file is, but a driver that joins one by its
# address sends the token only if it is told to before ray is imported.
_token = Path.home() / ".ray" / "auth_token"
if _token.exists() and _token.stat().st_size:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
