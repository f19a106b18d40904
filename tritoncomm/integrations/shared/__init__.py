"""What modules about trainers have in common."""
