"""Thin entry points with the spelling of the documented commands."""
