"""Choosing a method: cost formulas, network measurements and simulated comparisons."""
