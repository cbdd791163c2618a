"""Jobs that any number of processes share: the store of finished ones, leases, a queue and a forecast."""
