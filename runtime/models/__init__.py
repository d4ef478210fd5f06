"""A model folder or file -> what it is, what it needs, and which engine runs it."""
