"""Modules and parameters, and what is refused."""
