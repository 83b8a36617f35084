"""Functions of networks, in forms that are fast on some device."""
