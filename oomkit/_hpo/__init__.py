"""The parts of `oomkit.optuna`."""
