"""Fleet of several servers, with a router that sends a prompt to the replica that knows its
text."""
