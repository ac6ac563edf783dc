"""The command `stratagem`: one file a subcommand."""
