"""The `clockwright` command."""
