"""Whole training programs in the manner of the ones that people run."""
