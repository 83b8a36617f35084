"""Many trials: a known grid (sweep), run in packs by Ray or in this process."""
