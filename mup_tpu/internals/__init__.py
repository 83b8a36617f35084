"""Private parts of Linux and of other packages that are used here, with versions and reasons."""
