"""Measurements on real hardware; results are kept beside the scripts."""
