"""A fleet in one process: generated or recorded traffic, servers that only take time, and the real
router."""
