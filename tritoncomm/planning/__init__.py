"""Choosing a method: predictions, network measurements and simulated comparisons."""
