"""Probes: short programs that show whether ranks compute, communicate and capture as they must."""
