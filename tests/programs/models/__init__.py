"""Families that are told apart by the model."""
