"""Limits of devices, and the queue for their memory."""
