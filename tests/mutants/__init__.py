"""`make mutants`: the sources with one invariant broken at a time; tests must tell each."""
