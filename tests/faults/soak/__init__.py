"""Minutes of mixed load on one server, with faults on: ``python -m tests.faults.soak --minutes 10``."""
