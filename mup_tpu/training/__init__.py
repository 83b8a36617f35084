"""Training packs: schedule, optimizer, pack, loop, checkpoint, rows."""
