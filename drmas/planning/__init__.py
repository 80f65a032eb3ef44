"""What a run would need and take on a cluster, before anything is rented: memory, seconds, cost, and a layout to start from."""
