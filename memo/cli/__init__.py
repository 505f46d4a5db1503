"""The command `memo`. Each subcommand imports its modules only when it is called."""
