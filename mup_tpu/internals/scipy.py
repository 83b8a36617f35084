"""Functions of `scipy.special` without the package around them, as it is in scipy 1.13 to 1.17.

Importing `scipy.special` wraps each function for other array libraries, and so imports `numpy.f2py`,
`numpy.testing` and more: a fifth of an analysis of a small table.
"""

import sys
import types

import scipy

if "scipy.special" not in sys.modules:
    _stand_in = types.ModuleType("scipy.special")
    _stand_in.__path__ = [f"{scipy.__path__[0]}/special"]
    sys.modules["scipy.special"] = _stand_in
    import scipy.special._ufuncs

    del sys.modules["scipy.special"]

_ufuncs = sys.modules["scipy.special._ufuncs"]
chdtr, chdtri, log_ndtr, ndtr, ndtri, stdtrit = (
    getattr(_ufuncs, name) for name in ("chdtr", "chdtri", "log_ndtr", "ndtr", "ndtri", "stdtrit")
)
