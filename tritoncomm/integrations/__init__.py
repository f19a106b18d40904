"""Sparse gradients in trainers, one module per framework. Importing a module imports its framework."""
