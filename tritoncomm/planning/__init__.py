"""Which method to use: cost formulas, measurements of the network, and comparisons in simulation."""
