"""Training of packs: the loop, members, optimizer, memory, checkpoints, rows."""
