"""A script of the user on hosts of this machine that have a slow network between them."""
