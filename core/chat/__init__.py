"""A chat in the terminal: the conversation, its commands, and where messages come from."""
