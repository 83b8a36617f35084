"""Setting of every Python process of the tests: garbage is looked for rarely.

Imports make a million objects that stay; looking through them again and again takes a tenth of the time in
which torch is imported, and a fifth of the time in which a worker of Ray Tune starts.
"""

import gc

gc.set_threshold(50_000, 20, 100)
