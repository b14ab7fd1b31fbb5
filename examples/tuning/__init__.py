"""The parts of tune_max.py."""
