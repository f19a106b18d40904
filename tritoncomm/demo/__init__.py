"""The demo: train a small language model with dense and with sparse exchange, and compare."""
