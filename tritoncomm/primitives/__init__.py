"""What the methods of :mod:`tritoncomm.algorithms` are made of."""
