"""Turns into training rows: assemble samples, filter groups, pack. Numpy only; nothing here knows models or losses."""
