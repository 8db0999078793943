"""The commands, one file each; `cli.main` declares their parameters."""
