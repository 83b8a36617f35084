"""Stand-in that hides the package of this name, whose import takes longer than the rest of Ray.

JupyterLab installs it for jsonschema, where it is optional; Ray imports jsonschema in each of its processes.
"""

raise ImportError("left out for tests: it makes a parser of a large grammar, which takes a second")
