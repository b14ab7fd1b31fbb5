"""Parts of benchmarks/peers.py: workloads, what is watched, one adapter for each contender."""
