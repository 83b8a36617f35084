"""Jobs, the scheduler that runs them, and its pools of workers: here, in forked processes, and on Ray."""
