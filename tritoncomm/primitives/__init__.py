"""Building blocks shared by the methods in :mod:`tritoncomm.algorithms`."""
