"""Methods that exist to be compared with. They have one form each, with messages of exact lengths."""
