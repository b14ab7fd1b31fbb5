"""Families that are told apart by the form of the batch."""
