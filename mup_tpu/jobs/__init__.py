"""Jobs, the scheduler that runs them, and its pools of workers: here, in forked processes, and on Ray."""

import os
from pathlib import Path

# Ray 2.60 starts clusters with token authentication if this file exists. A driver that joins one by its
# address sends the token only if this variable is set before the import of ray.
_token = Path(os.path.expanduser("~/.ray/auth_token"))  # `Path.home` raises for a user without one
if _token.exists() and _token.stat().st_size:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
