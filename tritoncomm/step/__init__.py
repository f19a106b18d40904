"""Between ``.grad`` and the update: what happens in one ``optimizer.step()``, shared by all front doors."""
