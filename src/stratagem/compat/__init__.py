"""Other libraries' names for what Stratagem does."""
