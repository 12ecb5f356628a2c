"""Soft actor-critic with a categorical critic pair."""
