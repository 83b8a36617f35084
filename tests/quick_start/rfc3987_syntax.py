"""Found in place of the package, as if it were not installed: importing it takes longer than the rest of Ray.

JupyterLab brings it for jsonschema, which does without; Ray imports jsonschema in each of its processes.
"""

raise ImportError("left out for tests: it makes a parser of a large grammar, which takes a second")
