"""What benchmarks share: the cluster under test, floors, counts of what came, results."""
