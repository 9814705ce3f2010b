"""What the benchmark of routers puts them to, and those of others that it puts to the same."""
