"""What all three processes share. Files here that the spawner uses import the standard library alone."""
