"""Attention over paged keys and values, one schedule per kind of chip; reached through pallas/dispatch.py."""
