"""The command `memo`. Each subcommand imports what it needs when it is called, and no sooner."""
