"""What an optimizer does with a delivery: its own step, or a rule for late gradients."""
