"""The door to libc10. Import torch first; use oomkit instead."""

api: object  # a PyCapsule
torch_version: str  # "major.minor" that it was built for
