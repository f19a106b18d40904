"""The demo: a small language model trained on real text, dense and compressed side by side."""
