"""From what a user types to token ids, and back from ids to clean text."""
