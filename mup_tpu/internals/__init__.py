"""Private parts of other packages that are used here: one module a package, with versions and reasons."""
