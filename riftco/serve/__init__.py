"""Serving: many requests at once over paged keys and values, each answered as if it were alone."""
