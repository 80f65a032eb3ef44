"""The training loop, processes and resume."""
