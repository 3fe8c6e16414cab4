"""Several servers as one: a router that sends a prompt where most of its text is known."""
