"""What is saved of an exchange, and loaded, also by other ranks."""
