"""Two processes with sharded weights and one process give the same loss curve, gates, scores and checkpoints."""
