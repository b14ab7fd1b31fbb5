"""Public functions whose own names a module of `oomkit` would take."""
