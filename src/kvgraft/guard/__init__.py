"""Quality guard of a live server: it samples answers, bounds their quality, and reduces reuse."""
