"""Jobs that any number of processes share: a store of finished jobs, leases, a queue and the time left."""
